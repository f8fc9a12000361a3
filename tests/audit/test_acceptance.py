"""The closed forms, against enumeration of the real rules and against what the papers say."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch
from random_laws import laws_with_zeros, whole_number_laws

from foretoken.audit.acceptance import (
    RULES,
    greedy,
    k_sequential,
    recursive_distinct,
    recursive_independent,
    single,
)
from foretoken.audit.drawn_trees import DrawnTree, step_gap
from foretoken.audit.law import BOUND
from foretoken.audit.transport import by_cut
from foretoken.lm.table import TableLM
from foretoken.types import Draw
from foretoken.verifiers.k_sequential import KSequential
from foretoken.verifiers.mixed import Mixed
from foretoken.verifiers.recursive import Recursive
from foretoken.verifiers.traversal import Traversal

HOT = {"temperature": 1.0}
UNRELATED = [whole_number_laws, laws_with_zeros]


def always(law: torch.Tensor) -> TableLM:
    """A table that says the same after every token."""
    return TableLM(law.log().repeat(len(law), 1))


@pytest.mark.parametrize("laws", UNRELATED)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_formulas_are_what_the_rules_do(k: int, laws) -> None:
    for p, q in laws(4, 6):
        for draw, rules, formula in (
            (Draw.IID, (Recursive(), Traversal()), recursive_independent),
            (Draw.DISTINCT, (Recursive(), Traversal()), recursive_distinct),
            (Draw.IID, (KSequential(),), k_sequential),
            (Draw.MIXED, (Mixed(), Traversal()), greedy),
        ):
            for rule in rules:
                gap = step_gap(rule, DrawnTree(always(q), (k,), draw), always(p), HOT)
                assert gap.variation <= BOUND
                assert formula(p, q, k) == pytest.approx(gap.law.accepted, abs=1e-9)


@pytest.mark.parametrize("laws", UNRELATED)
def test_with_one_candidate_all_rules_are_one(laws) -> None:
    for p, q in laws(6, 20):
        for rule in RULES:
            assert rule.accepts(p, q, 1) == pytest.approx(single(p, q), abs=1e-12)
        assert single(p, q) == pytest.approx(1.0 - 0.5 * float((p - q).abs().sum()), abs=1e-12)


@pytest.mark.parametrize("laws", UNRELATED)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_order_of_the_rules(k: int, laws) -> None:
    """One candidate, then with replacement, then k-sequential; without replacement beats with."""
    for p, q in laws(7, 40):
        independent = recursive_independent(p, q, k)
        assert single(p, q) <= independent + 1e-12
        assert independent <= k_sequential(p, q, k) + 1e-12
        assert independent <= recursive_distinct(p, q, k) + 1e-12
        bound = float(torch.minimum(p, 1.0 - (1.0 - q) ** k).sum())
        assert (1.0 - 1.0 / 2.718281828) * bound <= k_sequential(p, q, k) <= bound + 1e-12


def test_a_draft_that_is_right_is_always_accepted() -> None:
    for p, _ in laws_with_zeros(6, 10):
        for rule in RULES[:3]:
            assert rule.accepts(p, p.clone(), 2) == pytest.approx(1.0, abs=1e-12)


def test_laws_without_a_common_token_are_never_accepted() -> None:
    p = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    q = torch.tensor([0.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    for rule in RULES:
        assert rule.accepts(p, q, 2) == pytest.approx(0.0, abs=1e-12)


def test_what_the_specification_measured_on_unrelated_laws() -> None:
    """One node, V 4 to 6, k 2 to 3: greedy above distinct above independent above one."""
    rows = []
    for vocab in (4, 5, 6):
        for k in (2, 3):
            for p, q in whole_number_laws(vocab, 40, seed=10 * vocab + k):
                rows.append(
                    (
                        single(p, q),
                        recursive_independent(p, q, k),
                        recursive_distinct(p, q, k),
                        greedy(p, q, k),
                        by_cut(p, q, k, Draw.IID),
                        by_cut(p, q, k, Draw.DISTINCT),
                    )
                )
    means = [fmean(column) for column in zip(*rows, strict=True)]
    assert means == pytest.approx([0.704, 0.812, 0.861, 0.897, 0.909, 0.961], abs=0.03)
    assert means == sorted(means)
    better = fmean(row[3] >= row[2] - 1e-12 for row in rows)
    assert 0.7 < better < 1.0, "mostly, but not always"
