"""Draft as much as pays, or nothing: tokens per second from measured costs and running survival.

Each step maximises expected tokens over expected seconds over all lengths, plain decoding included.
All choices look at past steps only, so the law of the text does not change. Where a seed has to
repeat sampled text, the clock may not choose: such a row has a policy of its own that counts what
the table of costs says, frozen when it was measured.
"""

from __future__ import annotations

from typing import Any

from foretoken.contract import StoppingRule
from foretoken.controllers.policy import Limits, Policy
from foretoken.controllers.step_costs import StepCosts
from foretoken.types import Budget, CostTable, DecodeState, Rows, Step, Traits


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

    def alone(self, row: DecodeState) -> Policy | None:
        """The policy of a row whose draws have to repeat; None for rows that share one."""
        if self.traits.fixed or not row.repeatable:
            return None
        if self not in row.private:
            row.private[self] = self.policy(counted=True)
        found: Policy = row.private[self]
        return found

    def budgets(self, rows: Rows) -> list[Budget]:
        own = [self.alone(row) for row in rows]
        together = [row for row, policy in zip(rows, own, strict=True) if policy is None]
        shared = iter(self.shared.budgets(together) if together else ())
        return [
            next(shared) if policy is None else policy.budgets([row])[0]
            for row, policy in zip(rows, own, strict=True)
        ]

    def observe(self, step: Step) -> None:
        places: list[int] = []
        for at, row in enumerate(step.rows):
            policy = self.alone(row)
            if policy is None:
                places.append(at)
            else:
                policy.observe(*one_row(step, at), None)
        if len(places) == len(step.rows):
            share = sum([score.share for score in step.scores]) / len(step.scores)
            self.shared.observe(step.rows, step.drafts, step.verdicts, step.times, share)
        elif places:  # the clock of a step of both kinds tells of neither
            kept = [one_row(step, at) for at in places]
            rows, drafts, verdicts = zip(*kept, strict=True)
            self.shared.observe(
                [row for (row,) in rows],
                [draft for (draft,) in drafts],
                [verdict for (verdict,) in verdicts],
                None,
            )


def one_row(step: Step, at: int) -> tuple[list[Any], list[Any], list[Any]]:
    """A row of a step, its draft and its verdict."""
    return [step.rows[at]], [step.drafts[at]], [step.verdicts[at]]
