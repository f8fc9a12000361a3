"""How far guesses of some classes come true: what was accepted over what was promised, by class.

Learned from whatever was looked up, scored or not: the text says in any case what would have been
right. Counts of a class fade with its own trials. They lie in arrays whose addresses operations in
C know: these change in place.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from foretoken.drafters.parts.chances import trials
from foretoken.native.library import library
from foretoken.native.look_ups import OddsTable, guesses_tried
from foretoken.trees.guesses import Guesses


class ClassOdds:
    """A factor for each class, apart for greedy and for sampled text."""

    __slots__ = (
        "factors",
        "fade",
        "floor",
        "hits",
        "places",
        "prior",
        "promised",
        "table",
        "weight",
    )

    def __init__(
        self,
        prior: Sequence[float],
        weight: float,
        fade: float,
        floor: float = 0.0,
        places: Sequence[int] | None = None,
    ) -> None:
        """`prior`: factors before anything was seen, worth `weight` trials; no factor falls below
        `floor`. `places`: of marks, their class; beyond them the last one. None: marks are classes.
        """
        library()  # compiled now, if it must be, and not in the first step of a text
        self.prior, self.places = tuple(prior), tuple(places or range(len(prior)))
        self.weight, self.fade, self.floor = weight, fade, floor
        self.hits = array("d", bytes(16 * len(prior)))
        self.promised = array("d", bytes(16 * len(prior)))
        self.factors = array("d", 2 * self.prior)
        self.table = OddsTable(
            hits=self.hits, promised=self.promised, factors=self.factors,
            prior=array("d", prior), places=array("q", self.places), count=len(prior),
            longest=len(self.places), weight=weight, fade=fade, floor=floor,
        )  # fmt: skip

    def place(self, mark: int, greedy: bool) -> int:
        """Where trials of its class are counted."""
        band = self.places[mark] if mark < len(self.places) else len(self.prior) - 1
        return greedy * len(self.prior) + band

    def chance(self, mark: int, share: float, greedy: bool) -> float:
        """The chance of a guess of this class that is promised so large a share."""
        found = share * self.factors[self.place(mark, greedy)]
        return found if found < 1.0 else 1.0

    def tried(self, mark: int, share: float, greedy: bool, hit: bool) -> None:
        """A guess whose parent was reached, and whether it was the one."""
        at, hits, promised = self.place(mark, greedy), self.hits, self.promised
        hits[at] = hits[at] * self.fade + hit
        promised[at] = promised[at] * self.fade + share
        prior = self.prior[at % len(self.prior)]
        factor = (hits[at] + self.weight * prior) / (promised[at] + self.weight)
        self.factors[at] = max(factor, self.floor)

    def all_tried(self, found: Guesses, said: Sequence[int], greedy: bool) -> None:
        """Compare a tree with the tokens that came, whatever part of it was scored."""
        if len(found) == 1 or guesses_tried(found, array("q", said), self.table, greedy):
            return
        marks, shares = found.marks, found.shares
        for node, _, hit in trials(found.tree, said):
            self.tried(marks[node], shares[node], greedy, hit)
