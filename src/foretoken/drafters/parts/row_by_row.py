"""Base of drafters that propose row by row, remember nothing and have no shape of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.contract import Features, NoOptions, StoppingRule
from foretoken.types import Budget, DecodeState, Draft, Rows, Step, Taps, Traits


class RowDrafter:
    """Override `propose_one`, or `propose` where rows share a forward, and what else is needed."""

    traits = Traits()
    lossless = True  # False: its view scores by another law than the target's
    why = ""  # that law, for messages

    Config: Any = NoOptions

    def __init__(self, config: Any = None) -> None:
        """Drafters with options keep them as their `config`."""

    def fitting(self, depth: int | None, nodes: int | None) -> Budget | None:
        return None

    def propose_one(self, row: DecodeState, budget: Budget) -> Draft:
        raise NotImplementedError

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]:
        return [self.propose_one(r, b) for r, b in zip(rows, budgets, strict=True)]

    def start(self, row: DecodeState, seen: Features | None) -> None:
        return None

    def reading(self) -> Taps:
        return self.traits.taps

    def observe(self, step: Step) -> None:
        return None

    def finish(self, row: DecodeState) -> None:
        row.private.pop(self, None)
