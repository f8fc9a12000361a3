"""Draft as much as pays, or nothing: tokens per second from measured costs and running survival.

Each step maximises expected tokens over expected seconds over all lengths, plain decoding included.
All choices look at past steps only, so the law of the text does not change.
"""

from __future__ import annotations

from foretoken.controllers.policy import Limits, Policy
from foretoken.controllers.shared_policy import SharedPolicy
from foretoken.controllers.step_costs import StepCosts


class CostModel(SharedPolicy[Policy]):
    """Chooses length, nodes of a tree, or prices, for every row and step."""

    Config = Limits

    def __init__(self, config: Limits | None = None) -> None:
        super().__init__()
        self.config = config or Limits()

    def policy(self, counted: bool = False) -> Policy:
        plain, asking = self.costs.target[min(self.costs.target)], self.costs.asking
        return Policy(self.config, self.traits, StepCosts.of(self.costs), asking / plain, counted)
