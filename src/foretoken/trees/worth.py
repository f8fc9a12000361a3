"""What nodes of a growing tree are worth: chances as experience corrects them, against prices."""

from __future__ import annotations

import math
from array import array
from bisect import bisect
from collections.abc import Iterable, Sequence

from foretoken.types import Budget, Draft, Prices


def paying(chances: Sequence[float], prices: Prices | None) -> tuple[int, float]:
    """How many nodes, best first, are worth most above the price of scoring them, and how much."""
    if prices is None or not prices.nodes:
        return len(chances), added(chances)
    best, best_at, total, nodes = 0.0, 0, 0.0, prices.nodes
    for count, chance in enumerate(chances[: len(nodes) - 1], 1):
        total += chance
        if total - nodes[count] > best:
            best, best_at = total - nodes[count], count
    return best_at, best


def added(numbers: Iterable[float]) -> float:
    """Their sum, one by one as in C: `sum` of later Pythons makes up for rounding."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def least_paying(budget: Budget) -> float | None:
    """The chance below which no node is worth its price; None where nothing is priced."""
    if budget.prices is not None:
        return max(budget.prices.cheapest, 0.0)
    return budget.least


def worth(chances: Sequence[float], prices: Prices | None) -> float:
    """Expected tokens of a draft below its root, above the price of scoring its nodes.

    `chances` are those of its nodes, the root's first.
    """
    expected = sum(chances[1:])
    if prices is None or not prices.nodes or len(chances) == 1:
        return expected
    if len(chances) > len(prices.nodes):
        return -math.inf  # more nodes than anybody may score
    return expected - prices.nodes[len(chances) - 1]


class Calibration:
    """How far the draft's confidence can be believed: accepted over promised, by confidence.

    Counted at the children of nodes that were reached, apart for the favourite child and the others
    and for greedy rows: a greedy target takes the favourite more often than its probability says,
    and the others far less. Old counts fade with a half-life of 512 children. The arrays change in
    place: operations in C know where they are.
    """

    EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
    FADE = 0.5 ** (1 / 512)
    WEIGHT = 4.0  # children whose promise is taken at its word at first

    def __init__(self, weight: float = WEIGHT) -> None:
        self.weight = weight
        size = 4 * (len(self.EDGES) + 1)
        self.hits = array("d", bytes(8 * size))
        self.promised = array("d", bytes(8 * size))

    def chance(self, law: float, rank: int, greedy: bool) -> float:
        """The chance that a child of this law and rank is the one, given that its parent is."""
        # NaN, or zero by rounding: a token may be drawn at a temperature at which it is likelier
        if not law > 0.0:
            return 0.0
        at = 4 * bisect(self.EDGES, law) + 2 * greedy + (rank > 0)
        word = self.weight * law
        chance = law * (self.hits[at] + word) / (self.promised[at] + word)
        return chance if chance < 1.0 else 1.0

    def tried(self, law: float, rank: int, greedy: bool, hit: bool) -> None:
        """A child whose parent was reached, and whether it was the one."""
        if law != law:  # no number: what is counted would be none from now on
            return
        at = 4 * bisect(self.EDGES, law) + 2 * greedy + (rank > 0)
        self.hits[at] = self.hits[at] * self.FADE + hit
        self.promised[at] = self.promised[at] * self.FADE + law

    def judged(
        self,
        draft: Draft,
        path: Sequence[int],
        laws: Sequence[float],
        ranks: Sequence[int],
        greedy: bool,
    ) -> None:
        """A draft of which `path` stands; laws and ranks of the nodes that were proposed."""
        reached = {0, *path}
        for node, parent in enumerate(draft.tree.parents):
            if parent in reached:
                at = node if draft.origin is None else draft.origin[node]
                self.tried(laws[at], ranks[at], greedy, node in reached)


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
