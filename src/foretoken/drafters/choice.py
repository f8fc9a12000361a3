"""Two ways to guess behind one door: look-up drafters in one tree, or the first target layers.

The controller, which knows the seconds, names an arm and a bar (`Budget`): a look-up is made in any
case, and drafts where it is worth more than the bar. Both see every outcome. Nothing is merged: a
chain behind an early exit costs layers, whose price a tree of look-ups must not pay. Every draft is
judged by its own kind, and look-ups are fixed candidates, so choosing by their worth is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from foretoken.drafters.fusion import Fusion
from foretoken.drafters.rows import RowDrafter
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Drafter,
    Draw,
    KeepGoing,
    Remembers,
    Scores,
    Verdict,
)


class Choice(RowDrafter):
    """Arm 0 merges the sources of fixed candidates; every other source is an arm of its own."""

    valued = sparing = True
    shared = True  # arms are told apart by what all rows brought, and rules differ in their coins

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        pass

    def __init__(self, *sources: Drafter, config: Config | None = None) -> None:
        self.config = config or self.Config()
        merged = [one for one in sources if one.draws == {Draw.POINT} and not one.taps]
        alone = [one for one in sources if one not in merged]
        self.choices: list[Any] = [Fusion(*merged), *alone]
        self.arms = len(self.choices)
        self.draws = frozenset().union(*(one.draws for one in self.choices))
        self.trees = any(one.trees for one in self.choices)

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        states = []
        for one in self.choices:
            row.draft = None
            one.start(row, seen)
            states.append(row.draft)
        row.draft = states

    def propose(
        self, rows: Sequence[DecodeState], budgets: Sequence[Budget], keep_going: KeepGoing
    ) -> list[Draft]:
        # Looking up costs next to nothing, and what it would have said is learned from as well.
        drafts: list[Draft] = self.acting(0, rows, "propose", rows, budgets, keep_going)
        arm = max((budget.arm for budget in budgets), default=0)
        if not arm:
            return drafts
        found = [self.acting(0, [row], "worth", row) for row in rows]
        if sum(found) >= sum(budget.bar for budget in budgets):
            return drafts
        drafts = self.acting(arm, rows, "propose", rows, budgets, keep_going)
        return [replace(draft, arm=arm) for draft in drafts]

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        for at in range(self.arms):
            self.acting(at, rows, "observe", rows, drafts, scores, verdicts)

    def finish(self, row: DecodeState) -> None:
        for at in range(self.arms):
            self.acting(at, [row], "finish", row)

    def save(self) -> None:
        """Keep what the arms have learnt, where their options name a file."""
        for one in self.choices:
            if isinstance(one, Remembers):
                one.save()

    def acting(self, at: int, rows: Sequence[DecodeState], act: str, *given: Any) -> Any:
        """Let an arm act on rows that carry its own private state."""
        held = [row.draft for row in rows]
        for row, states in zip(rows, held, strict=True):
            row.draft = states[at]
        result = getattr(self.choices[at], act)(*given)
        for row, states in zip(rows, held, strict=True):
            states[at], row.draft = row.draft, states
        return result
