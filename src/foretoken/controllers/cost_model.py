"""Draft as much as pays, or nothing: tokens per second from measured costs and running survival.

Each step maximises expected tokens over expected seconds over all lengths, plain decoding included.
All choices look at past steps only, so the law of the text does not change. Where a seed has to
repeat sampled text, the clock may not choose: such a row has a policy of its own that counts what
the table of costs says, frozen when it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.contract import StoppingRule
from foretoken.controllers.policy import Limits, Policy
from foretoken.controllers.step_costs import StepCosts
from foretoken.types import Budget, CostTable, DecodeState, Draft, Rows, Step, Traits, Verdict


class CostModel:
    """Chooses length, nodes of a tree, or prices, for every row and step."""

    needs_costs = True
    stop: StoppingRule | None = None

    Config = Limits

    def __init__(self, config: Limits | None = None) -> None:
        self.config = config or Limits()
        self.traits = Traits()

    def bind(self, drafter: Any) -> None:
        self.traits = drafter.traits

    def learn(self, costs: CostTable) -> None:
        self.costs = costs
        self.shared = self.policy()

    def policy(self, counted: bool = False) -> Policy:
        """A policy that knows the measured costs and no outcome yet."""
        plain, asking = self.costs.target[min(self.costs.target)], self.costs.asking
        return Policy(self.config, self.traits, StepCosts.of(self.costs), asking / plain, counted)

    def alone(self, row: DecodeState) -> _Alone | None:
        """What is kept of a row whose draws have to repeat; None for rows that share a policy."""
        if self.traits.fixed or not row.repeatable:
            return None
        if self not in row.private:
            row.private[self] = _Alone(self.policy(counted=True))
        found: _Alone = row.private[self]
        return found

    def budgets(self, rows: Rows) -> list[Budget]:
        own = [self.alone(row) for row in rows]
        together = [row for row, alone in zip(rows, own, strict=True) if alone is None]
        shared = iter(self.shared.budgets(together) if together else ())
        return [
            next(shared) if alone is None else alone.budget(row)
            for row, alone in zip(rows, own, strict=True)
        ]

    def observe(self, step: Step) -> None:
        places: list[int] = []
        for at, row in enumerate(step.rows):
            alone = self.alone(row)
            if alone is None:
                places.append(at)
            else:
                alone.given = None
                alone.policy.observe(*of_rows(step, [at]), None)
        if len(places) == len(step.rows):
            share = sum([score.share for score in step.scores]) / len(step.scores)
            self.shared.observe(step.rows, step.drafts, step.verdicts, step.times, share)
        elif places:  # the clock of a step of both kinds tells of neither
            self.shared.observe(*of_rows(step, places), None)


@dataclass(slots=True)
class _Alone:
    """The policy of one row, and its choice for the step under way.

    A step may be run again without a row that raised, or after an interrupt: it is the same step.
    """

    policy: Policy
    given: Budget | None = None

    def budget(self, row: DecodeState) -> Budget:
        if self.given is None:
            [self.given] = self.policy.budgets([row])
        return self.given


def of_rows(
    step: Step, places: Sequence[int]
) -> tuple[list[DecodeState], list[Draft], list[Verdict]]:
    """Some rows of a step, their drafts and their verdicts."""
    return (
        [step.rows[at] for at in places],
        [step.drafts[at] for at in places],
        [step.verdicts[at] for at in places],
    )
