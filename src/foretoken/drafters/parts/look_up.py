"""Base of drafters that look fixed candidates up: a tree in plain memory, row by row."""

from __future__ import annotations

from foretoken.drafters.parts.chances import chosen
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.trees.guesses import Guesses
from foretoken.types import Budget, DecodeState, Draft


class LookUp(RowDrafter):
    """Override `look_up`. Whoever merges drafters uses its trees where they lie."""

    cut: Guesses  # room for the part that is drafted

    def look_up(self, row: DecodeState, budget: Budget) -> Guesses:
        """All that is found, which the row keeps until it is asked again."""
        raise NotImplementedError

    def propose_one(self, row: DecodeState, budget: Budget) -> Draft:
        return chosen(self.look_up(row, budget), self.cut, budget)
