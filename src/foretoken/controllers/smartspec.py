"""Draft for the most tokens per second of a whole batch, or nothing: SmartSpec (arXiv 2406.14066).

Goodput is expected tokens over predicted seconds: tokens from how often the guesses of each request
stood, seconds from a linear model of a step (`latency`). All lengths are looked at again in every
step, none included. What is looked up for next to nothing is proposed long, and cut to what is
worth scoring once it is known who found something; only fixed candidates can be cut. All else
follows from past steps, so the law of the text does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.contract import Guided
from foretoken.controllers.goodput_policy import Goals, GoodputPolicy
from foretoken.controllers.latency import Latency
from foretoken.controllers.shared_policy import SharedPolicy
from foretoken.types import CostTable, Draft, Rows


class SmartSpec(SharedPolicy[GoodputPolicy]):
    """Chooses length, or nodes of a tree, for every row and step."""

    Config = Goals

    def __init__(self, config: Goals | None = None) -> None:
        super().__init__()
        self.config = config or Goals()
        self.looks_up = False

    def bind(self, drafter: Any) -> None:
        super().bind(drafter)
        # Nothing that such a drafter holds follows which of its candidates are scored.
        traits = self.traits
        self.looks_up = traits.fixed and not traits.taps and not isinstance(drafter, Guided)

    def learn(self, costs: CostTable) -> None:
        if costs.rows == 1:
            self.frozen = fitted(costs)
        super().learn(costs)

    def policy(self, counted: bool = False) -> GoodputPolicy:
        latency = self.frozen if counted else fitted(self.costs)
        return GoodputPolicy(self.config, self.traits, latency, self.looks_up)

    def admit(self, rows: Rows, drafts: Sequence[Draft]) -> Sequence[Draft]:
        if not self.looks_up or all(row.uid in self.silent for row in rows):
            return drafts
        return self.shared.admit(rows, drafts)


def fitted(costs: CostTable) -> Latency:
    """The latency of a lone row, as it was measured."""
    latency = Latency()
    latency.learn(costs)
    return latency
