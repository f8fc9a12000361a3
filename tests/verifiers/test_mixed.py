"""The greedy multi-draft rule: exact, as good as its candidates allow, and what breaks it."""

from __future__ import annotations

import pytest
import torch
from two_tables import pair

from foretoken.audit.broken import FlattenedQ
from foretoken.audit.drawn_trees import DrawnTree, rule_gap, step_gap
from foretoken.audit.law import BOUND, PROMPT
from foretoken.contract import StoppingRule
from foretoken.trees.mixed import best_and_rest
from foretoken.types import Budget, DecodeState, Draft, Draw
from foretoken.verifiers.mixed import Mixed
from foretoken.verifiers.point import Point
from foretoken.verifiers.recursive import Recursive
from foretoken.verifiers.traversal import Traversal

HOT = {"temperature": 1.0}
SHAPES = ((1,), (2,), (3,), (2, 1), (1, 2), (2, 2), (3, 2))
RULES = (Mixed(), Traversal())
both_rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


@both_rules
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("widths", SHAPES)
def test_one_step_is_exact(rule: Mixed, widths: tuple[int, ...], holes: bool) -> None:
    target, guess = pair(4, 5, holes)
    gap = step_gap(rule, DrawnTree(guess, widths, Draw.MIXED), target, HOT)
    assert gap.law.accepted > 0
    assert gap.variation <= BOUND


@both_rules
@pytest.mark.parametrize("widths", [(2, 1), (3,), (2, 2)])
def test_whole_texts_are_exact(rule: Mixed, widths: tuple[int, ...]) -> None:
    target, guess = pair(3, 5)
    assert rule_gap(rule, Draw.MIXED, widths, target, guess, HOT).variation <= BOUND


@both_rules
@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_a_law_with_fewer_tokens_than_candidates(rule: Mixed, setting: dict) -> None:
    target, guess = pair(4, 3)
    drafter = DrawnTree(guess, (3, 1), Draw.MIXED)
    assert step_gap(rule, drafter, target, {**HOT, **setting}).variation <= BOUND


@both_rules
def test_at_temperature_zero_it_is_the_walk(rule: Mixed) -> None:
    target, guess = pair(4, 3)
    cold = {"temperature": 0.0}
    found = step_gap(rule, DrawnTree(guess, (2, 2), Draw.MIXED), target, cold).law
    walked = step_gap(Point(), DrawnTree(guess, (2, 2), Draw.POINT), target, cold).law
    assert found.joint == walked.joint and found.outcomes == 1


class SampledFirst(DrawnTree):
    """The sampled child before the fixed ones."""

    def propose_one(
        self, row: DecodeState, budget: Budget, stop: StoppingRule | None = None
    ) -> Draft:
        draft = super().propose_one(row, budget, stop)
        tree = draft.tree
        tokens = (tree.tokens[0], *reversed(tree.tokens[1:]))
        return Draft(type(tree)(tokens, tree.parents), draft.draw, draft.q)


@both_rules
def test_the_order_of_the_children_is_free(rule: Mixed) -> None:
    target, guess = pair(4, 7)
    last = step_gap(rule, DrawnTree(guess, (3,), Draw.MIXED), target, HOT)
    first = step_gap(rule, SampledFirst(guess, (3,), Draw.MIXED), target, HOT)
    assert first.variation <= BOUND
    assert first.law.accepted == pytest.approx(last.law.accepted, abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_its_acceptance_is_the_formula(k: int, seed: int) -> None:
    target, guess = pair(5, 20 + 2 * seed)
    p = target.after(PROMPT).softmax(-1)
    best, rest = best_and_rest(guess.after(PROMPT).softmax(-1), k - 1)
    promised = float(p[best].sum() + torch.minimum(p, rest).sum())
    for rule in RULES:
        gap = step_gap(rule, DrawnTree(guess, (k,), Draw.MIXED), target, HOT)
        assert gap.law.accepted == pytest.approx(promised, abs=1e-12)


class ReportsWhole(DrawnTree):
    """Draws from what is left of q and reports all of q: the sampled child looks rarer than it is.

    The fixed children are kept out of sight, so that the law has one child to explain.
    """

    def propose_one(
        self, row: DecodeState, budget: Budget, stop: StoppingRule | None = None
    ) -> Draft:
        draft = super().propose_one(row, budget, stop)
        q = row.warp.law(row.tokens, self.lm.after(row.tokens))
        only = type(draft.tree)((draft.tree.tokens[0], draft.tree.tokens[-1]), (-1, 0))
        return Draft(only, draft.draw, (q, None))


@both_rules
@pytest.mark.parametrize("lying", [ReportsWhole, FlattenedQ])
def test_a_law_that_is_not_the_draws_own_is_seen(rule: Mixed, lying: type[DrawnTree]) -> None:
    target, guess = pair(4, 5)
    gap = step_gap(rule, lying(guess, (2,), Draw.MIXED), target, HOT)
    assert gap.variation > 1e-3


@pytest.mark.parametrize("declared", [Draw.IID, Draw.DISTINCT])
def test_mixed_children_taken_for_drawn_ones(declared: Draw) -> None:
    """With the law that mixed children store, the recursive rule stays exact but gives up at the
    first fixed child; with all of q stored it is biased."""
    target, guess = pair(4, 5)

    class WholeLaw(DrawnTree):
        def propose_one(
            self, row: DecodeState, budget: Budget, stop: StoppingRule | None = None
        ) -> Draft:
            draft = super().propose_one(row, budget, stop)
            q = row.warp.law(row.tokens, self.lm.after(row.tokens))
            return Draft(draft.tree, draft.draw, (q, None, None))

    sound = step_gap(Mixed(), DrawnTree(guess, (2,), Draw.MIXED), target, HOT)
    stored = step_gap(Recursive(), DrawnTree(guess, (2,), Draw.MIXED, declared), target, HOT)
    whole = step_gap(Recursive(), WholeLaw(guess, (2,), Draw.MIXED, declared), target, HOT)
    assert stored.variation <= BOUND and stored.law.accepted < sound.law.accepted - 0.1
    assert whole.variation > 1e-2


def test_the_fixed_children_first_would_keep_less() -> None:
    """They would leave sum min(p, (1 - p(T)) qt) for the sampled one in place of sum min(p, qt)."""
    lost = []
    for seed in range(10):
        target, guess = pair(5, 20 + 2 * seed)
        p = target.after(PROMPT).softmax(-1)
        best, rest = best_and_rest(guess.after(PROMPT).softmax(-1), 1)
        kept = step_gap(Mixed(), DrawnTree(guess, (2,), Draw.MIXED), target, HOT).law.accepted
        held = float(p[best].sum())
        lost.append(kept - held - float(torch.minimum(p, (1.0 - held) * rest).sum()))
    assert min(lost) >= -1e-12 and sum(lost) / len(lost) > 0.02
