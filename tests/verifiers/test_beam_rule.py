"""One layer of beams: its attempts, its counts, and the biases of the released code."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from foretoken.coins import enumerate_outcomes
from foretoken.errors import ConfigError
from foretoken.verifiers.beams import Beams, acceptances, check_beams, count_law, residuals

ATTEMPTS = 3


def law(seed: int, size: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(size, generator=generator, dtype=torch.float64)).softmax(0)


def independent(q: torch.Tensor, coins) -> list[int]:
    return [coins.draw(q) for _ in range(ATTEMPTS)]


def without_replacement(q: torch.Tensor, coins) -> list[int]:
    found: list[int] = []
    for _ in range(ATTEMPTS):
        left = q.clone()
        left[found] = 0.0
        found.append(coins.draw(left / left.sum()))
    return found


def best_for_rare(q: torch.Tensor, coins) -> list[int]:
    """Rare pairs are replaced by the likeliest one."""
    return [int(q.argmax()) if q[pair] < 0.1 else pair for pair in independent(q, coins)]


def drawn(p: torch.Tensor, q: torch.Tensor, draw, width: int = 2, **config):
    """The law of (passed, accepted, pairs) over all coins."""
    rule = Beams(Beams.Config(num_beams=width, **config))
    found: Counter = Counter()

    def run(coins):
        verdict = rule.judge(p, q, draw(q, coins), width, coins)
        return verdict.passed, verdict.accepted, verdict.pairs

    for outcome, chance in enumerate_outcomes(run):
        found[outcome] += chance
    return found


def gap(found: Counter, p: torch.Tensor, count: int) -> float:
    """TV of the first `count` pairs from independent draws."""
    heads: Counter = Counter()
    for (_, _, pairs), chance in found.items():
        heads[pairs[:count]] += chance
    return 0.5 * sum(
        abs(heads[pairs] - float(p[list(pairs)].prod()))
        for pairs in itertools.product(range(len(p)), repeat=count)
    )


@pytest.mark.parametrize("seed", range(3))
def test_what_a_layer_gives_are_independent_draws_from_the_target(seed: int) -> None:
    p, q = law(seed), law(seed + 10)
    for config, count in (({"min_width": 2}, 2), ({"threshold": 1.0}, 1)):
        assert gap(drawn(p, q, independent, **config), p, count) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_so_do_attempts_whose_beam_fell(seed: int) -> None:
    """Part of Q's mass belongs to beams that no longer stand."""
    p, whole = law(seed), law(seed + 10, 6)

    def draw(_, coins):
        return [pair if pair < 4 else None for pair in independent(whole, coins)]

    assert gap(drawn(p, whole[:4], draw, min_width=2), p, 2) < 1e-12


@pytest.mark.parametrize("draw", [without_replacement, best_for_rare])
def test_the_released_draws_are_biased(draw) -> None:
    gaps = [gap(drawn(law(s), law(s + 10), draw, min_width=2), law(s), 2) for s in range(3)]
    assert max(gaps) > 0.02


@pytest.mark.parametrize("seed", range(3))
def test_the_number_accepted_has_the_computed_law(seed: int) -> None:
    p, q = law(seed), law(seed + 10)
    computed = count_law(acceptances(residuals(p, q, ATTEMPTS), q, ATTEMPTS))
    seen = [0.0] * (ATTEMPTS + 1)
    for (_, accepted, _), chance in drawn(p, q, independent, ATTEMPTS, min_width=ATTEMPTS).items():
        seen[accepted] += chance
    assert seen == pytest.approx(computed, abs=1e-12)
    assert sum(computed) == pytest.approx(1.0)


def test_counts_from_a_draft_subtracted_twice_are_wrong() -> None:
    """As released; how far off it is depends on how often two rejections follow each other."""
    off = []
    for seed in range(3):
        p, q = law(seed), law(seed + 10)
        left, chances = p, []
        for _ in range(ATTEMPTS):
            chances.append(float(left.minimum(q).sum()))
            left = (left - 2 * q).clamp(min=0.0)
            left = left / left.sum()
        right = acceptances(residuals(p, q, ATTEMPTS), q, ATTEMPTS)
        off.append(abs(count_law(chances)[0] - count_law(right)[0]))
    assert max(off) > 1e-3


def test_the_width_falls_with_the_threshold_and_grows_with_agreement() -> None:
    p, q = law(1), law(12)
    closer = [(1 - s) * q + s * p for s in (0.0, 0.3, 0.6, 0.9, 1.0)]

    def width(threshold: float, draft: torch.Tensor) -> int:
        rule = Beams(Beams.Config(num_beams=6, threshold=threshold))
        return rule.wanted(acceptances(residuals(p, draft, 6), draft, 6), 6)

    for threshold in (-1.0, 0.3, 0.7, 0.9):
        widths = [width(threshold, draft) for draft in closer]
        assert widths == sorted(widths) and widths[-1] == 6 and widths[0] < 6
    falling = [width(t, q) for t in (0.05, 0.3, 0.6, 0.9, 1.0)]
    assert falling == sorted(falling, reverse=True) and falling[0] > falling[-1] == 1


def test_one_beam_kept_is_still_a_draw_from_the_target() -> None:
    p, q = law(2), law(15)
    found = drawn(p, q, independent, min_width=2, keep_one=True)
    assert gap(found, p, 1) < 1e-12
    assert {len(pairs) for passed, _, pairs in found if not passed} == {1}


@pytest.mark.parametrize("width", [0, -1, 2.5, True, 5])
def test_numbers_of_beams_that_mean_nothing_are_refused(width) -> None:
    with pytest.raises(ConfigError, match="num_beams"):
        check_beams(width, 4)


def test_widths_and_thresholds_out_of_range_are_refused() -> None:
    for config in ({"num_beams": 2, "min_width": 3}, {"min_width": 0}, {"threshold": 1.5}):
        with pytest.raises(ConfigError, match=list(config)[-1]):
            Beams(Beams.Config(**config))
