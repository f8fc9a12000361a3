"""Controllers that learn while they run: one policy for all rows that share forwards.

Where a seed has to repeat sampled text, neither the clock nor neighbours may choose: such a row has
a policy of its own that counts what the table of a lone row's costs says, frozen when it was
measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Generic, Protocol, TypeVar

from foretoken.contract import StoppingRule
from foretoken.controllers.goodput import NONE
from foretoken.types import (
    Budget,
    CostTable,
    DecodeState,
    Draft,
    Rows,
    Step,
    StepTimes,
    Traits,
    Verdict,
)


class Decides(Protocol):
    """What a policy of drafting does for a group of rows."""

    def learn(self, costs: CostTable) -> None: ...
    def lacks(self, rows: int) -> bool: ...
    def budgets(self, rows: Rows, beside: Rows = ()) -> list[Budget]:
        """What each row may draft in a step that it shares with rows `beside` these."""
        ...

    def observe(
        self,
        rows: Rows,
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        times: StepTimes | None,
        share: float = 1.0,
    ) -> None:
        """Learn from what was accepted, and from the clock where there is one to be believed.

        `share`: of a whole target forward that scoring took.
        """
        ...


P = TypeVar("P", bound=Decides)


class SharedPolicy(ABC, Generic[P]):
    """Base: say how a policy is made that knows the costs of a lone row and no outcome yet."""

    needs_costs = True
    stop: StoppingRule | None = None
    costs: CostTable  # of a lone row
    shared: P

    def __init__(self) -> None:
        self.traits = Traits()
        self.silent: frozenset[int] = frozenset()  # rows of the step that may not draft, by uid

    @abstractmethod
    def policy(self, counted: bool = False) -> P:
        """A policy; one that counts takes the table of costs for the clock."""

    def bind(self, drafter: Any) -> None:
        self.traits = drafter.traits

    def learn(self, costs: CostTable) -> None:
        if costs.rows > 1:
            self.shared.learn(costs)
            return
        self.costs = costs
        self.shared = self.policy()

    def lacks(self, rows: int) -> bool:
        return rows > 1 and self.shared.lacks(rows)

    def alone(self, row: DecodeState) -> Alone | None:
        """What is kept of a row whose draws have to repeat; None for rows that share a policy."""
        if self.traits.fixed or not row.repeatable:
            return None
        if self not in row.private:
            row.private[self] = Alone(self.policy(counted=True))
        found: Alone = row.private[self]
        return found

    def budgets(self, rows: Rows) -> list[Budget]:
        """Rows that may not draft are nobody's: what became of no draft would tell of no drafter,
        and who probes with them learns nothing.
        """
        self.silent = frozenset(row.uid for row in rows if row.guesses == 0 or row.room <= 1)
        own = [None if row.uid in self.silent else self.alone(row) for row in rows]
        shares = [
            alone is None and row.uid not in self.silent
            for row, alone in zip(rows, own, strict=True)
        ]
        together = list(compress(rows, shares))
        beside = [row for row, mine in zip(rows, shares, strict=True) if not mine]
        shared = iter(self.shared.budgets(together, beside) if together else ())
        return [
            next(shared) if one_of_many else NONE if alone is None else alone.budget(row)
            for row, alone, one_of_many in zip(rows, own, shares, strict=True)
        ]

    def admit(self, rows: Rows, drafts: Sequence[Draft]) -> Sequence[Draft]:
        return drafts

    def observe(self, step: Step) -> None:
        places: list[int] = []
        for at, row in enumerate(step.rows):
            if row.uid in self.silent:
                continue
            alone = self.alone(row)
            if alone is None:
                places.append(at)
            else:
                alone.given = None
                alone.policy.observe(*of_rows(step, [at]), None)
        if places:
            share = sum([score.share for score in step.scores]) / len(step.scores)
            self.shared.observe(*of_rows(step, places), own_times(step, places), share)


@dataclass(slots=True)
class Alone:
    """The policy of one row, and its choice for the step under way.

    A step may be run again without a row that raised, or after an interrupt: it is the same step.
    """

    policy: Decides
    given: Budget | None = None

    def budget(self, row: DecodeState) -> Budget:
        if self.given is None:
            [self.given] = self.policy.budgets([row])
        return self.given


def own_times(step: Step, places: Sequence[int]) -> StepTimes | None:
    """What a step took, of its drafting the part of these rows; None where only others drafted."""
    if len(places) == len(step.rows):
        return step.times
    depths = [max(draft.tree.depths()) for draft in step.drafts]
    deepest, own = max(depths), max([depths[at] for at in places])
    if own == deepest:
        return step.times
    return replace(step.times, draft=step.times.draft * own / deepest) if own else None


def of_rows(
    step: Step, places: Sequence[int]
) -> tuple[list[DecodeState], list[Draft], list[Verdict]]:
    """Some rows of a step, their drafts and their verdicts."""
    return (
        [step.rows[at] for at in places],
        [step.drafts[at] for at in places],
        [step.verdicts[at] for at in places],
    )
