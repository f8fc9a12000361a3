"""How far drafts survive: running chances of slots in a chain and of ranks in a tree.

Slot j is tried only where it was offered and the j - 1 slots before it were accepted, so the
chances stay unbiased whatever lengths are chosen (accepted / offered would not). Their products are
the chances P(accepted length >= j). That is also right under block verification: there the chance
of keeping at least j tokens does not depend on how many more were drafted, and only prefix lengths
enter here, never single coins.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.trees.counts import Counts
from foretoken.types import TokenTree

BELIEF = 0.7  # chance of a slot nobody has tried, worth two trials


class Slots(Counts):
    """Slots of a chain."""

    __slots__ = ()

    def update(self, accepted: int, offered: int) -> None:
        self.fade()
        for slot in range(accepted):
            self.tried(slot, True)
        if accepted < offered:
            self.tried(accepted, False)

    def rates(self, depth: int, prior: Sequence[float], weight: float) -> list[float]:
        """Chance of each slot given that it is reached."""
        return [self.rate(slot, prior[slot], weight) for slot in range(depth)]

    def chained(self, depth: int, first: float, weight: float) -> list[float]:
        """The same with each slot's prior being the slot before it: what a new slot likely is."""
        rates = []
        for slot in range(depth):
            first = self.rate(slot, first, weight)
            rates.append(first)
        return rates


class Ranks(Counts):
    """Ranks of children: how often the b-th child of a reached node is the accepted one."""

    __slots__ = ()

    FALL = 0.35  # prior of a rank as a share of the rank before it

    def update(self, tree: TokenTree, path: Sequence[int]) -> None:
        self.fade()
        children = tree.children()
        for at, node in enumerate((0, *path)):
            hit = path[at] if at < len(path) else -1
            for rank, child in enumerate(children[node]):
                self.tried(rank, child == hit)

    def rates(self, width: int, first: float, weight: float) -> list[float]:
        rates: list[float] = []
        for rank in range(width):
            first = self.rate(rank, first, weight)
            rates.append(first)
            first *= self.FALL
        total = sum(rates)
        return rates if total <= 1.0 else [rate / total for rate in rates]


class Alarm:
    """Notices that the chance of the first slot has changed: a fast average leaves a slow one."""

    __slots__ = ("fast", "seen", "slow")

    FAST = 1.0 - 0.5 ** (1 / 8)  # half-life of 8 trials
    SLOW = 1.0 - 0.5 ** (1 / 64)
    EVIDENCE = 12.0  # effective trials of the fast average
    DEVIATIONS = 2.5

    def __init__(self) -> None:
        self.fast = self.slow = 0.5
        self.seen = 0

    def rings(self, hit: bool) -> bool:
        """Take in one trial; True when the past no longer tells the present."""
        self.seen += 1
        self.fast += max(self.FAST, 1.0 / self.seen) * (hit - self.fast)
        self.slow += max(self.SLOW, 1.0 / self.seen) * (hit - self.slow)  # a mean at first
        rate = min(max(self.slow, 0.05), 0.95)
        spread = (rate * (1.0 - rate) / self.EVIDENCE) ** 0.5
        if abs(self.fast - self.slow) <= self.DEVIATIONS * spread:
            return False
        self.slow = self.fast
        return True
