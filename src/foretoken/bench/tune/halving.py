"""Successive halving on paired speed-ups: who stays, when it is over, and who wins.

Every candidate is measured on the same prompts beside plain decoding. A gain is the logarithm of
its tokens per second over plain's on one prompt, so plain's own gains are 0. Two candidates are
compared by the differences of their gains, prompt by prompt: what a prompt or the machine did to
both falls out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

PLAIN = "plain"
USUAL, WEIGHT = (
    0.15,
    2.0,
)  # spread of differences before any is seen, and how many prompts it counts
WIDTH = 2.0  # standard errors on each side of a mean
HOPE = 0.25  # share of the upper half of an interval that counts where it is ranked
ENOUGH = 6  # prompts without which nothing is decided before the time is over
EQUAL = math.log(1.02)  # two candidates closer than this are as good as each other
SURELY = math.log(1.05)  # a simpler candidate is not taken where the fastest may be so far ahead
CLOSE = math.log(1.04)  # ends of an interval within which no further prompt is spent on the gap

Gain = Mapping[str, float]  # by prompt
Gains = Mapping[str, Gain]  # by candidate


@dataclass(frozen=True, slots=True)
class Gap:
    """How far one candidate is ahead of another, in logarithms of speed."""

    mean: float
    low: float
    high: float
    prompts: int

    @property
    def open(self) -> bool:
        """Whether either may be the faster one."""
        return self.low <= 0.0 <= self.high

    @property
    def closed(self) -> bool:
        """Whether more prompts would change nothing: one is faster, or both are as good."""
        return not self.open or -CLOSE <= self.low <= self.high <= CLOSE


def gap(ahead: Gain, behind: Gain) -> Gap:
    """The gap between two candidates on the prompts that both have.

    A spread seen on two or three prompts says little, so it is drawn towards a usual one.
    """
    found = differences(ahead, behind)
    if not found:
        return Gap(0.0, -math.inf, math.inf, 0)
    mean = fmean(found)
    squares = sum((value - mean) ** 2 for value in found) + WEIGHT * USUAL**2
    error = math.sqrt(squares / (len(found) - 1 + WEIGHT) / len(found))
    return Gap(mean, mean - WIDTH * error, mean + WIDTH * error, len(found))


def differences(ahead: Gain, behind: Gain) -> list[float]:
    """Of two candidates on the prompts that both have."""
    return [ahead[prompt] - behind[prompt] for prompt in ahead if prompt in behind]


def leader(gains: Gains, labels: Iterable[str]) -> str:
    """The fastest of `labels` on the prompts that all of them have; the first of equals."""
    names = list(labels)
    shared = [p for p in gains[names[0]] if all(p in gains[name] for name in names)]
    return max(names, key=lambda name: fmean(gains[name][p] for p in shared) if shared else 0.0)


def survivors(gains: Gains, alive: Sequence[str]) -> list[str]:
    """The better half of the candidates in the race, in the order given.

    They are ranked by how fast they look, and a little by how fast they may be, so that one that
    was measured badly is tried again: half a standard error above the mean of their gap to the
    leader. With all of the upper end, look-up, which is fast on some prompts and slow on others,
    outlives steady candidates that are faster. Whoever is behind beyond doubt, on prompts enough,
    goes in any case.
    """
    if len(alive) < 2:
        return list(alive)
    first = leader(gains, alive)
    gaps = {label: gap(gains[label], gains[first]) for label in alive}
    hopeful = [
        label
        for label, one in gaps.items()
        if label == first or one.high > 0.0 or one.prompts < ENOUGH
    ]
    hope = {
        # The median where it is higher: a pause of the machine on one prompt is nobody's fault.
        label: max(one.mean, median(differences(gains[label], gains[first]) or [0.0]))
        + HOPE * (one.high - one.mean)
        for label, one in gaps.items()
    }
    ranked = sorted(hopeful, key=lambda label: (label != first, -hope[label]))
    kept = ranked[: math.ceil(len(alive) / 2)]
    return [label for label in alive if label in kept]


def decided(gains: Gains, alive: Sequence[str], enough: int = ENOUGH) -> bool:
    """Whether more prompts could not change the choice: all gaps to the leader are closed."""
    first = leader(gains, alive)
    gaps = [gap(gains[first], gains[label]) for label in alive if label != first]
    return all(one.closed and one.prompts >= enough for one in gaps)


def level(gains: Gains, alive: Sequence[str], enough: int = ENOUGH) -> bool:
    """Whether all that are left are as good as the leader, as far as can be seen."""
    first = leader(gains, alive)
    gaps = [gap(gains[first], gains[label]) for label in alive if label != first]
    return all(one.mean <= EQUAL and one.prompts >= enough for one in gaps)


@dataclass(frozen=True, slots=True)
class Choice:
    """The configuration to use, and what is known about those next to it."""

    label: str
    fastest: str  # on average; another one where a simpler one is as good
    unsure: tuple[str, ...]  # measured about as long, those that may be faster than the chosen one


def choose(gains: Gains, alive: Sequence[str], simplest: Sequence[str]) -> Choice:
    """The fastest of those in the race to its end; of all that are as good, the simplest.

    As good is who is behind by less than can be felt, on prompts enough, and surely not by much.
    `simplest` has all labels, the simplest first.
    """
    first = leader(gains, alive)
    enough = min(ENOUGH, len(gains[first]))
    gaps = {label: gap(gains[first], gains[label]) for label in gains}
    as_good = [
        label
        for label, one in gaps.items()
        if label == first or (one.mean <= EQUAL and one.high <= SURELY and one.prompts >= enough)
    ]
    chosen = min(as_good, key=simplest.index)
    to_chosen = {label: gap(gains[chosen], gains[label]) for label in gains if label != chosen}
    many = len(gains[chosen])
    unsure = tuple(
        label for label, one in to_chosen.items() if one.low <= 0.0 and 2 * one.prompts > many
    )
    return Choice(chosen, first, unsure)


def clearly_faster(gains: Gains, alive: Sequence[str], usual: str) -> str | None:
    """The fastest of those in the race, if it is ahead of `usual` beyond doubt and to be felt."""
    if usual not in gains:
        return None
    first = leader(gains, [label for label in alive if label in gains])
    ahead = gap(gains[first], gains[usual])
    return first if first != usual and ahead.low > 0.0 and ahead.mean > EQUAL else None
