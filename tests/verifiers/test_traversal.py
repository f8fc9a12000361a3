"""Traversal verification: exact on every kind of children, never below the rule from the top."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from two_tables import pair

from foretoken.audit.drawn_trees import DrawnTree, rule_gap, step_gap
from foretoken.audit.law import BOUND
from foretoken.coins import Coins, SeededCoins
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.trees.build import chain
from foretoken.types import Budget, Draft, Draw, Laws, SamplingParams, Scores, TokenTree, Verdict
from foretoken.verifiers.block import Block
from foretoken.verifiers.mixed import Mixed
from foretoken.verifiers.point import Point
from foretoken.verifiers.recursive import Recursive
from foretoken.verifiers.traversal import Traversal, level_by_level
from foretoken.warp import Warp

HOT = {"temperature": 1.0}
SHAPES = ((2, 1), (2, 2), (3, 1), (1, 2), (2, 1, 1), (1, 2, 1))


class Printed(Traversal):
    """The rule a node at a time, for chains and fixed candidates too."""

    def judge_row(self, draft: Draft, scores: Scores, coins: Coins) -> Verdict:
        node, law = self.one_by_one(draft, scores.p, coins)
        return Verdict(tuple(draft.tree.path(node)), coins.draw(law))


class Levels(Traversal):
    """The rule a level at a time, wherever the laws lie."""

    def settle(self, draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
        return level_by_level(draft, laws, coins)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("widths", SHAPES)
@pytest.mark.parametrize("draw", sorted(Traversal.exact_for, key=str))
def test_one_step_is_exact(draw: Draw, widths: tuple[int, ...], holes: bool) -> None:
    vocab = 2 if draw is Draw.IID and max(widths) > 1 and math.prod(widths) > 2 else 3
    target, guess = pair(vocab, 5, holes)
    gap = step_gap(Traversal(), DrawnTree(guess, widths, draw), target, HOT)
    assert holes or gap.law.accepted > 0
    assert gap.variation <= BOUND


@pytest.mark.parametrize(
    ("draw", "widths", "vocab"),
    [
        (Draw.IID, (2, 1), 3),
        (Draw.IID, (3,), 3),
        (Draw.IID, (2, 2), 2),
        (Draw.DISTINCT, (1, 2), 3),
        (Draw.DISTINCT, (3,), 4),
        (Draw.MIXED, (2, 2), 3),
        (Draw.MIXED, (3,), 4),
    ],
)
def test_whole_texts_are_exact(draw: Draw, widths: tuple[int, ...], vocab: int) -> None:
    """One step after another: what a step rejected does not leak into the next."""
    target, guess = pair(vocab, 5)
    assert rule_gap(Traversal(), draw, widths, target, guess, HOT).variation <= BOUND


@pytest.mark.parametrize("draw", [Draw.IID, Draw.DISTINCT, Draw.MIXED])
@pytest.mark.parametrize("widths", [(2, 1), (1, 2)])
def test_a_level_at_a_time_is_exact(draw: Draw, widths: tuple[int, ...]) -> None:
    target, guess = pair(3, 5, holes=True)
    gap = step_gap(Levels(), DrawnTree(guess, widths, draw), target, HOT)
    assert gap.variation <= BOUND


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.7, "top_p": 0.7},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.3, "min_p": 0.3},
        {"temperature": 1.0, "repetition_penalty": 1.7, "presence_penalty": 0.5},
        {"temperature": 1.0, "eos": frozenset({2})},
    ],
)
@pytest.mark.parametrize("draw", sorted(Traversal.exact_for, key=str))
def test_it_stays_exact_where_warps_make_zeros(setting: dict, draw: Draw) -> None:
    target, guess = pair(4, 3)
    for widths in ((2, 1), (3,)):
        gap = step_gap(Traversal(), DrawnTree(guess, widths, draw), target, setting)
        assert gap.variation <= BOUND


class Growing(DrawnTree):
    """Decides before each level how wide it will be, by what has been drawn so far."""

    def children(self, q: Tensor, width: int, coins: SeededCoins) -> list[int]:
        return super().children(q, width if float(q.max()) < 0.6 else min(width, 1), coins)


@pytest.mark.parametrize("draw", [Draw.IID, Draw.DISTINCT])
def test_shapes_decided_before_the_draw_stay_exact(draw: Draw) -> None:
    target, guess = pair(3, 17)
    gap = step_gap(Traversal(), Growing(guess, (2, 2), draw), target, HOT)
    full = step_gap(Traversal(), DrawnTree(guess, (2, 2), draw), target, HOT)
    assert gap.variation <= BOUND
    assert gap.law.drafted < full.law.drafted - 0.1


class Pruned(DrawnTree):
    """Drops a child after its draw because it is unlikely: this changes the law."""

    def children(self, q: Tensor, width: int, coins: SeededCoins) -> list[int]:
        drawn = super().children(q, width, coins)
        return [token for token in drawn if float(q[token]) > 0.3] or drawn[:1]


def test_pruning_after_the_draw_is_seen() -> None:
    target, guess = pair(3, 5)
    assert step_gap(Traversal(), Pruned(guess, (2, 1), Draw.IID), target, HOT).variation > 1e-3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("draw", [Draw.IID, Draw.DISTINCT, Draw.MIXED])
@pytest.mark.parametrize(("widths", "vocab"), [((2, 1), 3), ((1, 2), 3), ((2, 2), 2), ((3,), 3)])
def test_it_keeps_at_least_what_the_rule_from_the_top_keeps(
    draw: Draw, widths: tuple[int, ...], vocab: int, seed: int
) -> None:
    target, guess = pair(vocab, 40 + 2 * seed)
    drafter = DrawnTree(guess, widths, draw)
    top = Mixed() if draw is Draw.MIXED else Recursive()
    above = step_gap(top, drafter, target, HOT).law.accepted
    below = step_gap(Traversal(), drafter, target, HOT).law.accepted
    assert below >= above - 1e-12
    if len(widths) == 1:
        assert below == pytest.approx(above, abs=1e-12)


def mean_accepted(rule: Traversal | Recursive | Mixed, draw: Draw, widths: Sequence[int]) -> float:
    found = []
    for seed in range(8):
        target, guess = pair(3, 60 + 2 * seed)
        found.append(step_gap(rule, DrawnTree(guess, widths, draw), target, HOT).law.accepted)
    return sum(found) / len(found)


@pytest.mark.parametrize("widths", [(2, 1), (2, 2)])
def test_the_greedy_draft_under_traversal_is_the_best_of_all(widths: tuple[int, ...]) -> None:
    best = mean_accepted(Traversal(), Draw.MIXED, widths)
    others = [
        mean_accepted(Mixed(), Draw.MIXED, widths),
        mean_accepted(Traversal(), Draw.DISTINCT, widths),
        mean_accepted(Recursive(), Draw.DISTINCT, widths),
    ]
    assert best > max(others) + 0.01
    assert others[1] > others[2] + 0.01


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("vocab", "depth"), [(2, 3), (3, 2)])
def test_on_a_chain_it_is_block_verification(vocab: int, depth: int, holes: bool) -> None:
    target, guess = pair(vocab, 9, holes)
    drafter = DrawnTree(guess, (1,) * depth, Draw.IID)
    gaps = [step_gap(rule, drafter, target, HOT) for rule in (Printed(), Block())]
    assert gaps[0].law.accepted == pytest.approx(gaps[1].law.accepted, abs=1e-12)
    assert max(gap.variation for gap in gaps) <= BOUND


class Thrifty(SeededCoins):
    """Spends no coin on what cannot happen: the plain rule never asks about such a node."""

    def flip(self, p: float) -> bool:
        return p > 0.0 and super().flip(p)


@pytest.mark.parametrize("draw", [Draw.IID, Draw.DISTINCT])
def test_the_fast_path_for_chains_spends_the_same_coins(draw: Draw) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for trial in range(200):
        depth, vocab = 1 + trial % 5, 3 + trial % 17
        p = torch.randn(depth + 1, vocab, generator=generator, dtype=torch.float64)
        q = (p[:depth] + torch.randn(depth, vocab, generator=generator)).softmax(-1)
        draws = SeededCoins(trial)
        draft = Draft(chain(0, [draws.draw(law) for law in q]), draw, (*q, None))
        laws = Warp(SamplingParams(temperature=1.0), 1, vocab).laws([0], draft.tree, p)
        scores = Scores(p, p=laws)
        fast = Traversal().judge_row(draft, scores, Thrifty(1000 + trial))
        coins = Thrifty(1000 + trial)
        node, law = Traversal().one_by_one(draft, laws, coins)
        assert fast == Verdict(tuple(draft.tree.path(node)), coins.draw(law))
        lengths.add(len(fast.path))
    assert lengths == set(range(6))


class AllFixed(DrawnTree):
    """Fixed candidates in the dress of mixed ones: nothing was drawn, and q says so."""

    def __init__(self, lm: TableLM, widths: Sequence[int]) -> None:
        super().__init__(lm, widths, Draw.POINT, Draw.MIXED)

    def reported(self, q: Tensor) -> Tensor:
        return torch.zeros_like(q)


@pytest.mark.parametrize("widths", [(2, 1), (2, 2), (1, 2, 1)])
def test_on_fixed_candidates_it_keeps_what_the_walk_keeps(widths: tuple[int, ...]) -> None:
    target, guess = pair(3, 5)
    gap = step_gap(Traversal(), AllFixed(guess, widths), target, HOT)
    walked = step_gap(Point(), DrawnTree(guess, widths, Draw.POINT), target, HOT)
    assert gap.variation <= BOUND
    assert gap.law.accepted == pytest.approx(walked.law.accepted, abs=1e-12)


class WholeResidual(Printed):
    """Corrects with relu(p - q), as if all of p were still owed."""

    def residual(self, p: Tensor, q: Tensor, owed: float) -> Tensor:
        return (p - q).clamp_(min=0.0)


class KeepsTried(Printed):
    """Judges a distinct sibling as if its elder could have been drawn again."""

    def without(self, q: Tensor, token: int) -> Tensor:
        return q


@pytest.mark.parametrize(
    ("wrong", "draw", "widths"),
    [(WholeResidual, Draw.IID, (1, 2)), (KeepsTried, Draw.DISTINCT, (2,))],
)
def test_a_wrong_rule_is_seen(wrong: type[Traversal], draw: Draw, widths: tuple[int, ...]) -> None:
    target, guess = pair(4 if widths == (2,) else 3, 5)
    drafter = DrawnTree(guess, widths, draw)
    assert step_gap(wrong(), drafter, target, HOT).variation > 1e-4
    assert step_gap(Printed(), drafter, target, HOT).variation <= BOUND


def test_distinct_children_are_not_independent_ones() -> None:
    target, guess = pair(4, 5)
    lying = DrawnTree(guess, (2,), Draw.DISTINCT, Draw.IID)
    assert step_gap(Traversal(), lying, target, HOT).variation > 1e-3


@pytest.mark.parametrize("widths", [(1, 2), (2, 1, 1), (3, 2), (4, 1, 2)])
@pytest.mark.parametrize("draw", [Draw.IID, Draw.DISTINCT, Draw.MIXED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_level_at_a_time_is_the_printed_rule(
    draw: Draw, widths: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The same node and law, coin by coin, also where rounding or zeros leave nothing."""
    generator = torch.Generator().manual_seed(0)
    agreed = set()
    for trial in range(60):
        vocab = 3 + trial % 17
        logits = torch.randn(2, vocab, vocab, generator=generator, dtype=torch.float64)
        target, guess = TableLM(logits[0]), TableLM(logits[0] + 10.0 ** -(trial % 4) * logits[1])
        setting = {"top_p": 0.8} if trial % 3 == 0 else {}
        row = make_row([0], SamplingParams(temperature=1.0, **setting), SeededCoins(trial), vocab)
        drafter = DrawnTree(guess, widths, draw)
        draft = drafter.propose_one(row, Budget(len(widths), 99))
        draft = Draft(
            draft.tree, draw, tuple(None if q is None else q.to(dtype) for q in draft.q or ())
        )
        scored = torch.stack([target.after([token]) for token in draft.tree.tokens]).to(dtype)
        laws = row.warp.laws(row.tokens, draft.tree, scored)
        node, law = level_by_level(draft, laws, Thrifty(trial))
        plain, plain_law = Traversal().one_by_one(draft, laws, Thrifty(trial))
        assert node == plain
        torch.testing.assert_close(law, plain_law, atol=1e-5, rtol=1e-3)
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-5) and float(law.min()) >= 0.0
        agreed.add(len(draft.tree.path(node)))
    assert len(agreed) >= len(widths), "paths of many lengths were compared"


def test_a_tree_of_any_form() -> None:
    """Nodes without children beside nodes with some, at every level."""
    tree = TokenTree((0, 1, 2, 1, 0, 2, 0), (-1, 0, 0, 1, 1, 3, 0))
    families = tree.children()
    ends = set()
    for seed in range(200):
        target, guess = pair(3, 2 * seed)
        q = tuple(
            guess.after([0, token]).softmax(-1) if family else None
            for token, family in zip(tree.tokens, families, strict=True)
        )
        logits = torch.stack([target.after([0, token]) for token in tree.tokens])
        laws = Warp(SamplingParams(temperature=1.0), 1, 3).laws([0], tree, logits)
        draft = Draft(tree, Draw.IID, q)
        node, law = level_by_level(draft, laws, Thrifty(seed))
        plain, plain_law = Traversal().one_by_one(draft, laws, Thrifty(seed))
        assert node == plain
        torch.testing.assert_close(law, plain_law)
        ends.add(node)
    assert ends == set(range(1, 7)), "three children of the root leave no other token"


def test_no_node_of_a_tree_is_accepted_by_a_law_of_nan() -> None:
    """A node with such a law is kept as often as one without children, and its law is refused."""
    tree = TokenTree((0, 1, 0, 1), (-1, 0, 0, 1))
    q = torch.tensor([0.5, 0.5, 0.0])
    draft = Draft(tree, Draw.DISTINCT, (q, q, None, None))
    logits = torch.zeros(4, 3)
    logits[0], logits[1] = torch.tensor([0.25, 0.25, 0.5]).log(), math.nan
    laws = Warp(SamplingParams(temperature=1.0), 1, 3).laws([0], tree, logits)
    ends = set()
    for seed in range(40):
        for settle in (Traversal().one_by_one, level_by_level):
            node, law = settle(draft, laws, Thrifty(seed))
            assert bool(law.isnan().any()) == (node == 1)
            ends.add((node, settle.__name__))
    assert len(ends) == 4 and {node for node, _ in ends} == {0, 1}
