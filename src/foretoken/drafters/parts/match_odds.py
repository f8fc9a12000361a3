"""How likely a text goes on the way it did after an earlier match: the longer, the likelier.

The chance of a copied token is its share of what followed the match before, times a factor for the
length of the match, which grows with every token that was right.
"""

from __future__ import annotations

from bisect import bisect_right

from foretoken.drafters.parts.class_odds import ClassOdds
from foretoken.trees.worth import least_paying
from foretoken.types import Budget

EDGES = (1, 2, 3, 4, 6, 9, 14, 22)  # least lengths of matches told apart
PRIOR = (0.08, 0.4, 0.55, 0.6, 0.75, 0.85, 0.92, 0.95)  # factors before anything was seen
WEIGHT = 8.0  # trials that these are worth
FADE = 0.5 ** (1 / 512)
# Least chance of a copy that is worth looking at even where scoring it costs nothing: what is
# offered is merged and learned from. No
# factor falls below it: copies that are never offered are never tried, and could not recover.
FLOOR = 0.01
PLACE = tuple(max(bisect_right(EDGES, length) - 1, 0) for length in range(EDGES[-1] + 1))


def least_copied(budget: Budget) -> float | None:
    """The chance below which no copy is offered; None where nothing is priced."""
    least = least_paying(budget)
    return None if least is None else max(least, FLOOR)


class MatchOdds(ClassOdds):
    """Factors by length of the match, apart for greedy and for sampled text."""

    def __init__(self) -> None:
        super().__init__(PRIOR, WEIGHT, FADE, FLOOR, PLACE)

    def reach(self, matched: int, greedy: bool, least: float, most: int) -> int:
        """How many tokens a copy behind such a match has, at best, before its chance falls below
        `least`; `most` at most.
        """
        chance = 1.0
        for ahead in range(most):
            chance *= self.chance(matched + ahead, 1.0, greedy)
            if chance < least:
                return ahead
        return most
