"""Rules for several drafts: k-sequential selection, and the naive one beside it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from foretoken.audit.drawn_trees import DrawnTree, rule_gap, step_gap
from foretoken.audit.law import BOUND
from foretoken.coins import Coins, SeededCoins, enumerate_outcomes
from foretoken.lm.table import TableLM
from foretoken.types import Draft, Draw, SamplingParams, Scores, TokenTree, Verdict
from foretoken.verifiers import k_sequential
from foretoken.verifiers.k_sequential import (
    KSequential,
    any_try,
    by_bisection,
    division_factor,
    one_try,
    owed,
)
from foretoken.verifiers.naive import Naive
from foretoken.verifiers.point import Point
from foretoken.verifiers.recursive import Recursive
from foretoken.warp import Warp

HOT = {"temperature": 1.0}


def laws(vocab: int, count: int, seed: int = 0, holes: bool = False):
    """Random pairs p, q."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(count):
        sharp = (0.5, 1.5, 3.0)[i % 3]
        logits = sharp * torch.randn(2, vocab, generator=generator, dtype=torch.float64)
        if holes:
            logits[0, i % vocab] = logits[1, (i + 1) % vocab] = -math.inf
        p, q = logits.softmax(-1)
        yield p, q


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("widths", [(2, 1), (1, 2), (3,), (2, 2)])
def test_selection_is_exact(widths: tuple[int, ...], holes: bool) -> None:
    vocab = 2 if widths == (2, 2) else 3
    target, guess = TableLM.random(vocab, seed=5), TableLM.random(vocab, seed=6)
    if holes:
        for a, b in itertools.product(range(vocab), repeat=2):
            target.logits[a, b, (a + b) % vocab] = -math.inf
            guess.logits[a, b, (a + 2 * b + 1) % vocab] = -math.inf
    gap = rule_gap(KSequential(), Draw.IID, widths, target, guess, HOT)
    assert gap.variation <= BOUND
    if not holes:
        assert gap.law.accepted > 0


@pytest.mark.parametrize("draw", [Draw.IID, Draw.DISTINCT, Draw.POINT])
@pytest.mark.parametrize("widths", [(2, 1), (1, 2), (3,)])
def test_the_naive_rule_is_exact_for_every_kind(draw: Draw, widths: tuple[int, ...]) -> None:
    target, guess = TableLM.random(3, seed=5), TableLM.random(3, seed=6)
    assert rule_gap(Naive(), draw, widths, target, guess, HOT).variation <= BOUND
    assert Point.exact_for == {Draw.POINT}, "the row for fixed candidates stays a row for those"


@pytest.mark.parametrize(("vocab", "k"), list(itertools.product((5, 20), (2, 4, 8))))
def test_what_is_owed_completes_the_target(vocab: int, k: int) -> None:
    for p, q in laws(vocab, 50, seed=k):
        rho = division_factor(p, q, k)
        assert 1.0 <= rho <= k
        tried = torch.minimum(q, p / rho)
        beta = float(tried.sum())
        accepted = any_try(beta, k)
        rest = p - tried * (accepted / beta)
        assert float(rest.min()) >= -1e-9
        assert float(rest.sum()) == pytest.approx(1.0 - accepted, abs=1e-9)
        if 1.0 - accepted > 1e-9:
            whole = tried * (accepted / beta) + owed(p, q, rho, k) * (1.0 - accepted)
            torch.testing.assert_close(whole, p, atol=1e-9, rtol=0)


def test_an_undivided_ratio_leaves_a_negative_residual() -> None:
    for p, q in laws(20, 100, seed=1):
        tried = torch.minimum(q, p)
        beta = float(tried.sum())
        assert float((p - tried * (any_try(beta, 4) / beta)).min()) < -1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fast_factor_equals_the_printed_one(dtype: torch.dtype) -> None:
    for vocab, k, holes in itertools.product((2, 3, 17, 300), (1, 2, 3, 8), (False, True)):
        for p, q in laws(vocab, 12, seed=vocab + k, holes=holes and vocab > 2):
            p, q = p.to(dtype), q.to(dtype)
            found = [any_try(one_try(p, q, f(p, q, k)), k) for f in (division_factor, by_bisection)]
            # Where nearly all is accepted many factors will do; what they accept is the same.
            assert found[0] == pytest.approx(found[1], abs=1e-6 if dtype == torch.float32 else 1e-9)


def test_a_large_vocabulary_is_searched_and_not_gone_through(monkeypatch) -> None:
    asked, enough = [], k_sequential.enough

    def counted(rho: float, beta: float, k: int) -> bool:
        asked.append(rho)
        return enough(rho, beta, k)

    for p, q in laws(50_000, 3, seed=4):
        with monkeypatch.context() as watched:
            watched.setattr(k_sequential, "enough", counted)
            fast = division_factor(p, q, 8)
        found = [any_try(one_try(p, q, rho), 8) for rho in (fast, by_bisection(p, q, 8))]
        assert found[0] == pytest.approx(found[1], abs=1e-9)
        assert 40 < len(asked) <= 100
        asked.clear()


def test_equal_laws_and_disjoint_ones() -> None:
    p = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64)
    assert division_factor(p, p, 3) == pytest.approx(1.0, abs=1e-6)
    q = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(owed(p, q, division_factor(p, q, 3), 3), p)


def chance(rule: KSequential | Recursive, p, q, k: int, draw: Draw = Draw.IID) -> float:
    """The chance that one of k children of the root is accepted."""
    vocab = len(p)
    warp = Warp(SamplingParams(temperature=1.0), 1, vocab)
    logits = p.log()

    def run(coins: Coins) -> Verdict:
        tokens: list[int] = []
        left = q.clone()
        for _ in range(k):
            tokens.append(coins.draw(left / left.sum()))
            if draw is Draw.DISTINCT:
                left[tokens[-1]] = 0.0
        tree = TokenTree((0, *tokens), (-1, *[0] * k))
        rows = logits.repeat(k + 1, 1)
        scores = Scores(rows, p=warp.laws([0], tree, rows))
        return rule.judge_row(Draft(tree, draw, (q, *[None] * k)), scores, coins)

    return sum(weight for found, weight in enumerate_outcomes(run) if found.path)


def test_the_papers_ordering_of_acceptance() -> None:
    """One draft <= recursive rejection <= k-sequential <= the bound; the naive rule below both."""
    better = 0
    for p, q in laws(3, 15, seed=2):
        one = float(torch.minimum(p, q).sum())
        bound = float(torch.minimum(p, 1 - (1 - q) ** 2).sum())
        naive, recursive = chance(Naive(), p, q, 2), chance(Recursive(), p, q, 2)
        selected, three = chance(KSequential(), p, q, 2), chance(KSequential(), p, q, 3)
        distinct = chance(Recursive(), p, q, 2, Draw.DISTINCT)
        assert naive <= recursive + 1e-9 and one <= recursive + 1e-9
        assert recursive <= selected + 1e-9 <= bound + 2e-9
        assert selected >= (1 - 1 / math.e) * bound
        assert three >= selected - 1e-9, "more drafts are never worse"
        assert distinct >= recursive - 1e-9, "nor are drafts that do not repeat each other"
        better += selected > recursive + 1e-6
    assert better >= 5


def best_possible(p, q, k: int) -> float:
    """Acceptance of the optimal transport plan for k independent drafts: min over sets A of
    p(A) + 1 - q(A)^k, reached by a threshold on p/q."""
    order = (p / q).sort().indices
    inside = [torch.cat([law.new_zeros(1), law[order].cumsum(0)]) for law in (p, q)]
    return float((inside[0] + 1.0 - inside[1] ** k).min())


def rejected_in_turn(p, q, k: int) -> float:
    """Acceptance of recursive rejection."""
    failed = 1.0
    for _ in range(k):
        failed *= 1.0 - float(torch.minimum(p, q).sum())
        rest = (p - q).clamp(min=0.0)
        p = rest / rest.sum()
    return 1.0 - failed


@pytest.mark.parametrize("vocab", [8, 32])
def test_selection_comes_close_to_the_optimum(vocab: int) -> None:
    shares, others = [], []
    for p, q in laws(vocab, 300, seed=vocab):
        best = best_possible(p, q, 2)
        kept = any_try(one_try(p, q, division_factor(p, q, 2)), 2)
        assert rejected_in_turn(p, q, 2) <= kept + 1e-9 <= best + 2e-9
        shares.append(kept / best)
        others.append(rejected_in_turn(p, q, 2) / best)
    assert sum(shares) / 300 >= 0.94
    assert sum(others) / 300 <= sum(shares) / 300 - 0.01
    p, q = next(laws(4, 1, seed=1))
    by_sets = min(
        float(p[list(chosen)].sum() + 1.0 - q[list(chosen)].sum() ** 2)
        for size in range(5)
        for chosen in itertools.combinations(range(4), size)
    )
    assert best_possible(p, q, 2) == pytest.approx(by_sets)


def test_more_chains_are_never_worse() -> None:
    """Expected accepted tokens of one step, chains two tokens long."""
    for seed in (1, 5):
        target, guess = TableLM.random(2, seed=seed), TableLM.random(2, seed=seed + 1)
        kept = [
            step_gap(KSequential(), DrawnTree(guess, (k, 1), Draw.IID), target, HOT).law.accepted
            for k in (1, 2, 3)
        ]
        assert kept[0] < kept[1] < kept[2]


def verdict(tokens, parents, choose: int, seed: int = 0) -> Verdict:
    """The verdict on drafts from a flat q of a target that wants token `choose` everywhere."""
    q = torch.full((4,), 0.25, dtype=torch.float64)
    logits = torch.full((len(tokens), 4), -math.inf, dtype=torch.float64)
    logits[:, choose] = 0.0
    tree = TokenTree(tokens, parents)
    inner = [node in parents for node in range(len(tokens))]
    draft = Draft(tree, Draw.IID, tuple(q if has else None for has in inner))
    warp = Warp(SamplingParams(temperature=1.0), 1, 4)
    return KSequential().judge_row(
        draft, Scores(logits, p=warp.laws([0], tree, logits)), SeededCoins(seed)
    )


def test_drafts_survive_by_value_and_pool_their_children() -> None:
    """Both drafts of token 1 live on; only the second goes on with token 1."""
    tokens, parents = (0, 1, 1, 3, 1), (-1, 0, 0, 1, 2)
    for seed in range(8):  # whether a try succeeds or the residual brings the token
        assert verdict(tokens, parents, 1, seed) == Verdict((2, 4), 1)
    assert verdict(tokens, parents, 2) == Verdict((), 2)


def test_at_temperature_zero_no_coin_is_used() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    warp = Warp(SamplingParams(), 1, 3)
    tree = TokenTree((0, 2, 1), (-1, 0, 0))
    scores = Scores(logits, p=warp.laws([0], tree, logits))
    for rule in (KSequential(), Naive()):
        assert rule.judge_row(Draft(tree, Draw.POINT), scores, None) == Verdict((2,), 2)
