"""Masks against the definition: a node sees what is committed, its ancestors and itself."""

import random

import pytest
import torch

from foretoken.lm.runtime.masks import Masks, at_the_edge
from foretoken.trees.masks import Sight, ancestors, depths, outside_window, prefixes

CPU = torch.device("cpu")


def random_parents(dice, count):
    return [-1, *(dice.randrange(i) for i in range(1, count))]


@pytest.mark.parametrize("seed", range(20))
def test_ancestors_and_depths_follow_parents(seed):
    dice = random.Random(seed)
    parents = random_parents(dice, dice.randrange(1, 90))
    seen, down = ancestors(parents), depths(parents)
    for node in range(len(parents)):
        path, above = set(), node
        while above >= 0:
            path.add(above)
            above = parents[above]
        assert {i for i in range(len(parents)) if seen[node] >> i & 1} == path
        assert down[node] == len(path) - 1


def test_trees_grown_in_pieces_are_the_same_trees():
    parents = random_parents(random.Random(1), 40)
    seen, down = ancestors(parents[:17]), depths(parents[:17])
    seen += ancestors(parents[17:], seen)
    down += depths(parents[17:], down)
    assert seen == ancestors(parents) and down == depths(parents)


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_bits_are_an_additive_mask(columns, dtype):
    dice = random.Random(columns)
    seen = [dice.randrange(1 << columns) for _ in range(11)]
    mask = Sight(dtype, CPU).unpack(seen, columns)
    assert mask.shape == (11, columns) and mask.dtype == dtype
    for row, bits in zip(mask.tolist(), seen, strict=True):
        least = torch.finfo(dtype).min
        assert row == [0.0 if bits >> i & 1 else least for i in range(columns)]


def test_a_chain_unpacks_to_a_triangle():
    mask = Sight(torch.float32, CPU).unpack(prefixes(6), 6)
    assert torch.equal(mask == 0, torch.ones(6, 6).tril().bool())


def test_windows_are_about_positions():
    queries, keys = torch.tensor([[5, 6, 6]]), torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6]])
    hidden = outside_window(queries, keys, window=3)[0]
    assert (~hidden[0]).tolist() == [False] * 3 + [True] * 5
    assert torch.equal(hidden[1], hidden[2])
    assert (~hidden[1]).tolist() == [False] * 4 + [True] * 4


@pytest.mark.parametrize("fold", [1, 3])
def test_a_mask_of_its_own_is_that_of_the_shared_buffer(fold):
    """What other devices than a CPU read begins where memory does."""
    masks = Masks(torch.float32, torch.device("cpu"))
    for width, tail, longest in ((2, 5, 5), (3, 4, 37), (1, 1, 300), (2, 2, 16)):
        block = torch.randn(width, tail)
        own = at_the_edge(block, longest, fold)
        assert torch.equal(own, masks._edge(block, longest, fold))
        assert own.is_contiguous() and own.storage_offset() == 0
