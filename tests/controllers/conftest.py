"""A simulated machine: drafts survive by a given chance, and time is arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from simulated_steps import SIZES, step_of

from foretoken.coins import SeededCoins
from foretoken.contract import Controller
from foretoken.trees.build import chain
from foretoken.types import (
    CostTable,
    DecodeState,
    Draft,
    Draw,
    SamplingParams,
    StepTimes,
    Verdict,
)


@dataclass
class Machine:
    """Times in plain steps. A slot survives with `chance(tokens so far, slot)`."""

    chance: Callable[[int, int], float]
    draft_cost: float = 0.1
    slope: float = 0.0  # what each further node adds to a target forward
    overhead: float = 0.02
    noise: float = 0.0
    rows: int = 1
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    offered: list[int] = field(default_factory=list)  # drafted tokens per row and step
    log: list[tuple[int, float]] = field(default_factory=list)  # tokens and seconds after each step
    lag: dict[int, int] = field(default_factory=dict)

    def target(self, nodes: int) -> float:
        return 1.0 - self.overhead + self.slope * (nodes - 1)

    def table(self) -> CostTable:
        return CostTable(
            {n: self.target(n) for n in SIZES},
            {k: self.draft_cost * k for k in range(1, 13)},
            self.overhead,
        )

    def run(self, controller: Controller, tokens: int) -> Machine:
        """Write about `tokens` tokens per row."""
        chance = random.Random(self.seed)
        rows = [
            DecodeState([0], 1, SamplingParams(max_new_tokens=10**9), SeededCoins(0), None)
            for _ in range(self.rows)
        ]
        while self.tokens < tokens * self.rows:
            budgets = controller.budgets(rows)
            depth = max(budget.depth for budget in budgets)
            catch_up = 0.0
            nodes = 0
            drafts, verdicts = [], []
            for row, budget in zip(rows, budgets, strict=True):
                offered = min(budget.depth, budget.nodes)
                self.offered.append(offered)
                nodes += 1 + offered
                lag = self.lag.get(row.uid, 0)
                if offered:
                    catch_up = max(catch_up, 0.1 * self.draft_cost * lag)
                accepted = 0
                at = self.tokens // self.rows
                while accepted < offered and chance.random() < self.chance(at, accepted):
                    accepted += 1
                self.lag[row.uid] = 0 if offered else lag + 1
                drafts.append(Draft(chain(0, [0] * offered), Draw.POINT))
                verdicts.append(Verdict(tuple(range(1, accepted + 1)), 0))
                self.tokens += accepted + 1
            jitter = 1.0 + self.noise * chance.uniform(-1.0, 1.0)
            times = StepTimes(
                rows=self.rows,
                nodes=nodes,
                context=1,
                draft=(depth * self.draft_cost + catch_up) * jitter,
                target=self.target(nodes) * jitter,
                other=self.overhead,
            )
            self.seconds += times.draft + times.target + times.other
            self.log.append((self.tokens, self.seconds))
            controller.observe(step_of(rows, drafts, verdicts, times))
        return self

    @property
    def rate(self) -> float:
        """Tokens per second against plain decoding of the same batch."""
        plain = self.rows / (self.target(self.rows) + self.overhead)
        return self.tokens / self.seconds / plain

    def rate_between(self, first: int, last: int) -> float:
        inside = [(t, s) for t, s in self.log if first <= t <= last]
        return (inside[-1][0] - inside[0][0]) / (inside[-1][1] - inside[0][1])


@pytest.fixture
def machine() -> type[Machine]:
    return Machine


@pytest.fixture
def best_fixed() -> Callable[..., float]:
    """The rate of the best fixed length, by sweep."""
    from foretoken.controllers.fixed import Fixed

    def sweep(**options: object) -> float:
        found = []
        for depth in range(13):
            runs = [
                Machine(seed=seed, **options).run(Fixed(Fixed.Config(depth=depth)), 1500).rate
                for seed in range(100, 104)
            ]
            found.append(sum(runs) / len(runs))
        return max(found)

    return sweep
