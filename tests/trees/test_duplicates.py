"""Repeated siblings as one place: who has whose children, and that every rule stays exact."""

import pytest
import torch

from foretoken.audit.drawn_trees import DrawnTree, step_gap
from foretoken.audit.law import BOUND
from foretoken.lm.table import TableLM
from foretoken.trees.duplicates import places
from foretoken.types import Draw, TokenTree
from foretoken.verifiers.k_sequential import KSequential
from foretoken.verifiers.recursive import Recursive
from foretoken.verifiers.traversal import Traversal


def test_children_of_repeated_siblings_go_to_the_first_at_every_depth():
    #               0  1  2  3  4  5  6  7  8
    tokens = (9, 4, 4, 5, 7, 7, 8, 1, 2)
    parents = (-1, 0, 0, 0, 1, 2, 3, 4, 5)
    found = places(TokenTree(tokens, parents))
    assert found[0] == [1, 2, 3], "repeated siblings are tried one by one"
    assert found[1] == [4, 5] and found[2] == []
    assert found[4] == [7, 8] and found[5] == [], "both say 4 7"
    assert found[3] == [6]


def test_a_tree_without_repeats_is_left_alone():
    tree = TokenTree((9, 4, 5, 4, 4), (-1, 0, 0, 1, 2))
    assert places(tree) == tree.children()


@pytest.mark.parametrize("widths", [(2, 2), (3, 1), (2, 1, 1)])
@pytest.mark.parametrize("rule", [Recursive, Traversal, KSequential])
@torch.inference_mode()
def test_the_law_is_kept_and_more_than_a_single_chain_is_accepted(rule, widths):
    target, guess = TableLM.random(3, seed=5), TableLM.random(3, seed=6)
    gap, alone = (
        step_gap(rule(), DrawnTree(guess, shape, Draw.IID), target, {"temperature": 1.0})
        for shape in (widths, (1,) * len(widths))
    )
    assert gap.variation <= BOUND
    assert gap.law.accepted > alone.law.accepted
