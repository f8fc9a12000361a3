"""What controllers share that learn nothing while they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.contract import StoppingRule
from foretoken.errors import check_values
from foretoken.types import Budget, CostTable, DecodeState, Draft, Go, Level, Rows, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The options that say a constant budget."""

    depth: int = 5  # drafted tokens on the longest path; a shape such as mcsd's brings its own
    nodes: int | None = None  # drafted nodes of a tree; None: `depth`, a chain's worth

    def __post_init__(self) -> None:
        check_values(
            self,
            ("depth", self.depth >= 0, "0 (no drafting) or more"),
            ("nodes", self.nodes is None or self.nodes >= 0, "0 (no drafting) or more"),
        )

    @property
    def budget(self) -> Budget:
        return Budget(self.depth, self.depth if self.nodes is None else self.nodes)


class Steady:
    """Base: one budget for every step; neither costs nor outcomes nor times change it."""

    needs_costs = False
    stop: StoppingRule | None = None
    budget: Budget

    def bind(self, drafter: Any) -> None:
        return None

    def learn(self, costs: CostTable) -> None:
        return None

    def lacks(self, rows: int) -> bool:
        return False

    def budgets(self, rows: Rows) -> list[Budget]:
        return [self.budget] * len(rows)

    def admit(self, rows: Rows, drafts: Sequence[Draft]) -> Sequence[Draft]:
        return drafts

    def observe(self, step: Step) -> None:
        return None


@dataclass(slots=True)
class Judged:
    """One row's draft in the step under way, as a stopping rule sees it."""

    over: bool = False


class Stopping(Steady):
    """Base of steady controllers that end drafts early: each is its own stopping rule.

    What a rule knows of the draft under way is the row's, and begins anew with every budget. The
    level that raises its doubts is still drawn, since its laws are paid for.
    """

    taps: tuple[Any, ...] = ()
    branches = False

    def __init__(self) -> None:
        self.stop = self

    def budgets(self, rows: Rows) -> list[Budget]:
        for row in rows:
            row.private[self] = self.fresh()
        return super().budgets(rows)

    def fresh(self) -> Judged:
        """What is known of a draft that has not begun."""
        return Judged()

    def after(self, row: DecodeState, level: Level) -> Go:
        draft: Judged = row.private[self]
        if draft.over:
            return Go.STOP
        draft.over = self.doubtful(level, draft)
        return Go.LAST if draft.over else Go.ON

    def doubtful(self, level: Level, draft: Any) -> bool:
        """Whether a level, not yet drawn, should be the last one of a draft."""
        raise NotImplementedError
