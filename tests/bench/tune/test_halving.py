"""Successive halving on synthetic tables of speeds: no clock, no model."""

import math
import random

import pytest

from foretoken.bench.tune.halving import (
    EQUAL,
    PLAIN,
    choose,
    clearly_faster,
    decided,
    gap,
    leader,
    level,
    survivors,
)


def table(speeds: dict[str, float], prompts: int, noise: float = 0.0, seed: int = 0):
    """Gains of candidates of known speed; a prompt's own luck is shared, noise is each one's."""
    draw = random.Random(seed)
    luck = {f"p{n}": draw.gauss(0.0, 0.3) for n in range(prompts)}
    return {
        label: {
            prompt: 0.0 if label == PLAIN else math.log(speed) + own + draw.gauss(0.0, noise)
            for prompt, own in luck.items()
        }
        for label, speed in speeds.items()
    }


SPEEDS = {PLAIN: 1.0, "a": 1.1, "b": 1.5, "c": 0.8, "d": 1.42, "e": 1.0, "f": 1.2, "g": 0.5}


@pytest.mark.parametrize("seed", range(20))
def test_halving_keeps_the_best_of_a_noisy_table(seed) -> None:
    alive, prompts = list(SPEEDS), 4
    while len(alive) > 2:
        gains = table(SPEEDS, prompts, noise=0.05, seed=seed)
        kept = survivors(gains, alive)
        assert len(kept) <= math.ceil(len(alive) / 2) and set(kept) <= set(alive)
        alive, prompts = kept, 2 * prompts
    gains = table(SPEEDS, 32, noise=0.05, seed=seed)
    assert "b" in alive and choose(gains, alive, list(SPEEDS)).label == "b"


def test_the_half_that_stays_is_the_faster_one_in_the_order_given() -> None:
    assert survivors(table(SPEEDS, 8), list(SPEEDS)) == ["b"]  # the others are behind beyond doubt
    drafting = [label for label in SPEEDS if label != PLAIN]
    assert survivors(table(SPEEDS, 3), drafting) == ["a", "b", "d", "f"]
    assert survivors(table(SPEEDS, 3), ["a"]) == ["a"]


def test_who_is_fast_now_and_then_does_not_outlive_who_is_faster() -> None:
    """Gains of look-up spread more: its interval reaches higher, its mean does not."""
    gains = table({"fast": 1.5, "steady": 1.47, "fickle": 1.4, "slow": 1.0}, 14)
    for i, prompt in enumerate(gains["fickle"]):
        gains["fickle"][prompt] += math.log(1.3) * (-1) ** i
    assert gap(gains["fickle"], gains["fast"]).high > gap(gains["steady"], gains["fast"]).high
    assert survivors(gains, list(gains)) == ["fast", "steady"]


def test_a_simpler_one_is_not_taken_on_a_wide_interval() -> None:
    """What may cost a tenth of the speed is no gain in simplicity."""
    gains = table({"chain": 1.4, "plain": 1.0, "prompt-lookup": 1.39}, 12)
    for i, prompt in enumerate(gains["prompt-lookup"]):
        gains["prompt-lookup"][prompt] += math.log(1.5) * (-1) ** i
    simplest = ["plain", "prompt-lookup", "chain"]
    assert choose(gains, ["chain", "prompt-lookup"], simplest).label == "chain"


def test_one_bad_measurement_does_not_end_a_candidate() -> None:
    """What a pause of the machine did to one prompt widens the gap's interval, upwards too."""
    gains = table({"fast": 1.3, "paused": 1.29, "slow": 1.1, "slower": 1.0}, 4)
    gains["paused"]["p0"] -= math.log(3.0)
    assert gap(gains["paused"], gains["fast"]).mean < gap(gains["slow"], gains["fast"]).mean
    assert "paused" in survivors(gains, list(gains))


def test_gaps_are_paired_by_prompt() -> None:
    ahead = {"p0": 0.1, "p1": 1.1, "p2": 2.1, "only here": 9.0}
    behind = {"p0": 0.0, "p1": 1.0, "p2": 2.0}
    found = gap(ahead, behind)
    assert found.mean == pytest.approx(0.1) and found.prompts == 3
    assert gap(behind, ahead).high == pytest.approx(-found.low)
    wide = gap({"p0": 0.5}, {"p0": 0.0})
    assert wide.open is (wide.low <= 0.0) and wide.high - wide.low > 0.4  # one prompt says little
    nothing = gap({"p0": 1.0}, {"p1": 0.0})
    assert nothing.open and not nothing.closed and nothing.prompts == 0


def test_the_choice_waits_for_prompts_enough_and_for_closed_gaps() -> None:
    clear = {PLAIN: 1.0, "b": 2.0}
    assert not decided(table(clear, 5), list(clear)) and decided(table(clear, 6), list(clear))
    assert decided(table(clear, 3), list(clear), enough=3)
    close = {PLAIN: 1.0, "b": 1.5, "d": 1.45}
    assert not decided(table(close, 6, noise=0.1), list(close))
    same = {PLAIN: 1.0, "b": 1.5, "d": 1.499}
    assert not decided(table(same, 8), list(same)) and decided(table(same, 400), list(same))


def test_leaders_are_level_where_they_are_as_good_as_can_be_seen() -> None:
    speeds = {"b": 1.5, "d": 1.49}
    assert level(table(speeds, 6), list(speeds)) and not level(table(speeds, 5), list(speeds))
    assert not level(table({**speeds, "a": 1.3}, 6), ["a", "b", "d"])


def test_of_those_as_good_as_the_fastest_the_simplest_is_chosen() -> None:
    speeds = {PLAIN: 1.0, "simple": 1.5, "complex": 1.51}
    found = choose(table(speeds, 40), list(speeds), list(speeds))
    assert (found.label, found.fastest) == ("simple", "complex") and found.unsure == ("complex",)
    faster = {**speeds, "complex": 1.5 * math.exp(2 * EQUAL)}
    assert choose(table(faster, 40), list(faster), list(faster)).label == "complex"


def test_a_simple_candidate_measured_on_few_prompts_does_not_win_by_doubt() -> None:
    gains = table({PLAIN: 1.0, "simple": 1.5, "complex": 1.51}, 40)
    gains["simple"] = dict(list(gains["simple"].items())[:2])
    assert choose(gains, ["complex"], [PLAIN, "simple", "complex"]).label == "complex"


def test_plain_is_chosen_where_nothing_pays() -> None:
    speeds = {PLAIN: 1.0, "a": 0.9, "b": 0.7}
    assert choose(table(speeds, 10), list(speeds), list(speeds)).label == PLAIN


def test_another_size_has_to_be_clearly_faster() -> None:
    speeds = {"usual": 1.5, "other": 1.6, "same": 1.51}
    assert clearly_faster(table(speeds, 40), list(speeds), "usual") == "other"
    assert clearly_faster(table(speeds, 2), list(speeds), "usual") is None, "two prompts are few"
    assert clearly_faster(table(speeds, 4000), ["usual", "same"], "usual") is None, "not felt"
    assert clearly_faster(table({"a": 1.5, "b": 1.4}, 40), ["a", "b"], "a") is None
    assert clearly_faster(table(speeds, 40), ["other"], "it failed") is None


def test_the_leader_is_judged_on_prompts_that_all_have() -> None:
    gains = {"a": {"p0": 0.0, "p1": 9.0}, "b": {"p0": 1.0}}
    assert leader(gains, ["a", "b"]) == "b"
