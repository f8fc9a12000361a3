"""No draft at all: plain decoding through the same loop, so the baseline has every advantage."""

from __future__ import annotations

from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.trees.build import undrafted
from foretoken.types import Budget, DecodeState, Draft, Memory, Traits


class Nothing(RowDrafter):
    """Proposes the root alone."""

    traits = Traits(memory=Memory.NOTHING)
    silent = True  # where it drafts, nobody else guesses either

    def propose_one(self, row: DecodeState, budget: Budget) -> Draft:
        return undrafted(row)
