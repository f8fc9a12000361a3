"""What controllers share that learn nothing while they run."""

from __future__ import annotations

from typing import Any

from foretoken.contract import StoppingRule
from foretoken.types import Budget, CostTable, Rows, Step


class Steady:
    """Base: one budget for every step; neither costs nor outcomes nor times change it."""

    needs_costs = False
    stop: StoppingRule | None = None
    budget: Budget

    def bind(self, drafter: Any) -> None:
        return None

    def learn(self, costs: CostTable) -> None:
        return None

    def budgets(self, rows: Rows) -> list[Budget]:
        return [self.budget] * len(rows)

    def observe(self, step: Step) -> None:
        return None


class Stopping(Steady):
    """Base of steady controllers that end drafts early: each is its own stopping rule.

    What a rule knows of the draft under way is the row's, and begins anew with every budget.
    """

    taps: tuple[Any, ...] = ()
    branches = False

    def __init__(self) -> None:
        self.stop = self  # type: ignore[assignment]

    def budgets(self, rows: Rows) -> list[Budget]:
        for row in rows:
            row.private[self] = self.fresh()
        return super().budgets(rows)

    def fresh(self) -> Any:
        """What is known of a draft that has not begun."""
        raise NotImplementedError
