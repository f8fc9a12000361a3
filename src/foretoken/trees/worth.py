"""What nodes of a growing tree are worth: chances as experience corrects them, against prices."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence


def paying(values: Sequence[float], prices: Sequence[float]) -> tuple[int, float]:
    """How many nodes, best first, are worth most above the price of scoring them, and how much."""
    if not prices:
        return len(values), sum(values)
    best, best_at, total = 0.0, 0, 0.0
    for count, value in enumerate(values[: len(prices) - 1], 1):
        total += value
        if total - prices[count] > best:
            best, best_at = total - prices[count], count
    return best_at, best


def cheapest(prices: Sequence[float]) -> float:
    """The least that one node can cost, however many are scored."""
    if len(prices) < 2:
        return -1.0
    return min((prices[n] - prices[0]) / n for n in range(1, len(prices)))


class Trust:
    """How far the draft's confidence can be believed: accepted over promised, by confidence.

    Counted at the children of nodes that were reached, apart for the favourite child and the others
    and for greedy rows: a greedy target takes the favourite more often than its probability says,
    and the others far less. Old counts fade with a half-life of 512 children.
    """

    EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
    FADE = 0.5 ** (1 / 512)
    WEIGHT = 4.0  # children whose promise is taken at its word at first

    def __init__(self) -> None:
        size = 4 * (len(self.EDGES) + 1)
        self.hits = [0.0] * size
        self.promised = [0.0] * size

    def place(self, law: float, rank: int, greedy: bool) -> int:
        return 4 * bisect(self.EDGES, law) + 2 * greedy + (rank > 0)

    def chance(self, law: float, rank: int, greedy: bool) -> float:
        """The chance that a child of this law and rank is the one, given that its parent is."""
        at = 4 * bisect(self.EDGES, law) + 2 * greedy + (rank > 0)  # as `place`, a call less
        word = self.WEIGHT * law
        chance = law * (self.hits[at] + word) / (self.promised[at] + word)
        return chance if chance < 1.0 else 1.0

    def tried(self, law: float, rank: int, greedy: bool, hit: bool) -> None:
        """A child whose parent was reached, and whether it was the one."""
        at = self.place(law, rank, greedy)
        self.hits[at] = self.hits[at] * self.FADE + hit
        self.promised[at] = self.promised[at] * self.FADE + law


class Decline:
    """What the next level of a tree adds, as a share of what the last one added."""

    FADE = 0.5 ** (1 / 64)

    def __init__(self) -> None:
        self.last, self.following = 1.0, 0.9  # a hopeful start

    @property
    def share(self) -> float:
        return min(self.following / self.last, 1.0)

    def update(self, last: float, following: float) -> None:
        self.last = self.last * self.FADE + last
        self.following = self.following * self.FADE + following
