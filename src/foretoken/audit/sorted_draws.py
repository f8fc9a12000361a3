"""A sorted draft over tables: drawn at the exit taken, and a bug: another exit's law reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from foretoken.audit.drawn_trees import DrawnTree
from foretoken.contract import StoppingRule
from foretoken.lm.draft_exits import Exits
from foretoken.lm.table import TableLM
from foretoken.lm.views.table_views import TableSortedExits
from foretoken.types import Budget, DecodeState, Draft, Draw

EXITS = Exits((1, 2, 4), (0.6, 0.55))  # each of which some contexts take


def leaving_early(table: TableLM) -> TableSortedExits:
    """A table as a sorted draft."""
    return TableSortedExits(table, EXITS)


class LeavesEarly(DrawnTree):
    """Draws every node from the law of the first exit that is sure enough."""

    def __init__(
        self, lm: TableLM, widths: Sequence[int], draw: Draw, declared: Draw | None = None
    ) -> None:
        self.whole = lm
        super().__init__(leaving_early(lm), widths, draw, declared)  # type: ignore[arg-type]


class LastExitsLaw(LeavesEarly):
    """Hands on the law of the last exit, wherever a node was drawn."""

    def propose_one(
        self, row: DecodeState, budget: Budget, stop: StoppingRule | None = None
    ) -> Draft:
        draft = super().propose_one(row, budget, stop)
        assert draft.q is not None
        laws: list[Tensor | None] = []
        for node, law in enumerate(draft.q):
            path = [draft.tree.tokens[above] for above in draft.tree.path(node)]
            context = [*row.tokens, *path]
            whole = row.warp.law(context, self.whole.after(context))
            laws.append(None if law is None else whole)
        return replace(draft, q=tuple(laws))
