"""A simulated machine that serves several rows at once: requests come and go."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

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
class Server:
    """Closed loop: as many rows as asked, each replaced when its text is over.

    `chance(request)` is how likely a guess of a request stands. The target reads its weights, or
    multiplies, whatever takes longer.
    """

    chance: Callable[[int], float] = lambda request: 0.7
    weights: float = 1.0  # reading the weights, whoever asks
    arithmetic: float = 0.06  # of one token
    row: float = 0.01  # what a row costs beside its tokens
    kv: float = 2e-5  # reading a cached token
    level: float = 0.06  # a forward of the draft
    guess: float = 0.002  # one token of it
    noise: float = 0.05
    prompt: int = 100
    text: int = 100
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    requests: int = 0
    rows: list[DecodeState] = field(default_factory=list)
    chances: dict[int, float] = field(default_factory=dict)
    lengths: list[float] = field(default_factory=list)  # drafted per row, step by step
    log: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def target(self, rows: int, nodes: int, cached: int) -> float:
        return (
            max(self.weights, self.arithmetic * nodes) + 0.004 * nodes + self.row * rows
            + self.kv * cached
        )  # fmt: skip

    def draft(self, rows: int, depth: int, nodes: int) -> float:
        return depth * self.level + self.guess * nodes if depth else 0.0

    def table(self, rows: int) -> CostTable:
        """What the engine would measure for a batch."""
        cached = rows * 150
        sizes = SIZES if rows == 1 else [rows * (1 + ahead) for ahead in (0, 1, 2, 4, 8)]
        return CostTable(
            {n: self.target(rows, n, cached) for n in sizes},
            {k: self.draft(rows, k, rows * k) for k in (1, 2, 3, 4, 6, 8)},
            0.0,
            rows=rows,
            cached=cached,
        )

    def admit(self, count: int) -> None:
        """Let requests come until there are so many, or the last ones leave."""
        while len(self.rows) < count:
            params = SamplingParams(max_new_tokens=self.text)
            tokens = [0] * self.prompt
            row = DecodeState(tokens, self.prompt, params, SeededCoins(0), None)
            self.chances[row.uid] = self.chance(self.requests)
            self.requests += 1
            self.rows.append(row)
        del self.rows[count:]

    def step(self, controller: Controller) -> None:
        rows = self.rows
        if controller.lacks(len(rows)):
            controller.learn(self.table(len(rows)))
        cached = sum(len(row.tokens) for row in rows)
        budgets = controller.budgets(rows)
        drafts, verdicts, offered = [], [], []
        for row, budget in zip(rows, budgets, strict=True):
            length = min(budget.depth, budget.nodes, row.room - 1)
            drafts.append(Draft(chain(0, [0] * length), Draw.POINT))
        drafts = list(controller.admit(rows, drafts))
        for row, draft in zip(rows, drafts, strict=True):
            offered.append(len(draft.tree) - 1)
            accepted = 0
            while accepted < offered[-1] and self.random.random() < self.chances[row.uid]:
                accepted += 1
            verdicts.append(Verdict(tuple(range(1, accepted + 1)), 0))
            row.tokens += [0] * (accepted + 1)
            self.tokens += accepted + 1
        jitter = 1.0 + self.noise * self.random.uniform(-1.0, 1.0)
        nodes = len(rows) + sum(offered)
        times = StepTimes(
            rows=len(rows),
            nodes=nodes,
            context=max(len(row.tokens) for row in rows),
            draft=self.draft(len(rows), max(offered), sum(offered)) * jitter,
            target=self.target(len(rows), nodes, cached) * jitter,
            other=0.0,
        )
        self.seconds += times.whole
        self.lengths.append(sum(offered) / len(rows))
        self.log.append((self.tokens, self.seconds))
        controller.observe(step_of(rows, drafts, verdicts, times))
        self.rows = [row for row in rows if row.room > 0]

    def run(self, controller: Controller, loads: list[tuple[int, int]]) -> Server:
        """Loads one after the other: so many rows, until so many tokens were written."""
        for count, tokens in loads:
            goal = self.tokens + tokens
            while self.tokens < goal:
                self.admit(count)
                self.step(controller)
        return self

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds
