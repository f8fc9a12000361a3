"""What forwards cost on this machine: interleaved repeats behind a short context."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from time import perf_counter

import torch
from torch import Tensor

from foretoken.coins import SeededCoins
from foretoken.engine.loop import Engine
from foretoken.trees.build import chain
from foretoken.types import (
    Budget,
    CostTable,
    DecodeState,
    Draft,
    Draw,
    SamplingParams,
    Verdict,
    endless,
)
from foretoken.warp import Warp

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PERIOD = 17  # the scratch text repeats itself, so that look-up drafters find something
REPEATS = 5
SLOW_SIZES = 16  # larger ones are extrapolated where a round would take too long


@torch.inference_mode()
def measure_costs(
    engine: Engine, max_depth: int = 12, seconds: float = 6.0, context: int = 128
) -> CostTable:
    """Time target forwards by nodes and drafts by depth, in about `seconds` or one round.

    A slow model gets fewer repeats, and chain drafters then no sizes beyond 16: those matter for
    trees and large batches, which correct the table as they run.
    """
    room = engine.target.max_length
    if room is not None:
        context = max(1, min(context, room // 2))
    sizes = list(SIZES)
    watch = _Stopwatch(engine)
    began = perf_counter()
    rounds, done = 1 + REPEATS, 0
    while done < rounds:
        with closing(_Scratch(engine, context)) as scratch:
            for depth in DEPTHS:
                budget = Budget(depth, 4 * depth if engine.drafter.trees else depth)
                if depth <= max_depth and scratch.fits(1 + budget.nodes):
                    watch.step(scratch, budget)
            for size in sizes:
                if scratch.fits(size):
                    watch.score(scratch, size)
        done += 1
        if done == 1:  # the first round warms every shape up
            took = perf_counter() - began
            if took > seconds / 3 and not engine.drafter.trees:
                sizes = [size for size in sizes if size <= SLOW_SIZES]
            rounds = 1 + max(1, min(REPEATS, int(seconds / max(took, 1e-9)) - 1))
    return watch.table()


class _Scratch:
    """A row nobody reads."""

    def __init__(self, engine: Engine, context: int) -> None:
        self.engine = engine
        vocab = engine.target.vocab_size
        self.pattern = [(3 + 7 * i) % vocab for i in range(PERIOD)]
        tokens = [self.pattern[i % PERIOD] for i in range(context)]
        params = SamplingParams(max_new_tokens=10**6)
        self.row = DecodeState(
            tokens, context, params, SeededCoins(0), Warp(params, context, vocab)
        )
        engine.drafter.start(self.row, engine.target.prefill(self.row, engine.drafter.taps))

    def fits(self, nodes: int) -> bool:
        room = self.engine.target.max_length
        return room is None or len(self.row.tokens) - 1 + nodes <= room

    def go_on(self) -> None:
        """The text grows by one token, whatever was scored."""
        self.row.tokens.append(self.pattern[len(self.row.tokens) % PERIOD])

    def close(self) -> None:
        self.engine.drafter.finish(self.row)
        self.engine.target.free([self.row])


class _Stopwatch:
    """Collects times; the first of each kind is a warm-up."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.target: dict[int, list[float]] = defaultdict(list)
        self.draft: dict[int, list[float]] = defaultdict(list)
        self.other: list[float] = []

    def step(self, scratch: _Scratch, budget: Budget) -> None:
        """A whole step with a draft of this size, of which nothing is accepted."""
        engine, row = self.engine, scratch.row
        began = perf_counter()
        drafts = engine.drafter.propose([row], [budget], always)
        drafted = perf_counter()
        scores = engine.target.score([row], drafts, engine.drafter.taps)
        _wait_for(scores[0].logits)
        scored = perf_counter()
        tree = drafts[0].tree
        scores[0].p = row.warp.laws(row.tokens, tree, scores[0].logits)
        engine.verifier.verify(drafts[0], scores[0], row.coins)
        engine.target.commit([row], [()])
        verified = perf_counter()
        scratch.go_on()
        verdict = Verdict((), row.tokens[-1])
        again = perf_counter()
        engine.drafter.observe([row], drafts, scores, [verdict])
        observed = perf_counter()
        deepest = max(tree.depths())
        if deepest:
            self.draft[deepest].append((drafted - began) + (observed - again))
        self.target[len(tree)].append(scored - drafted)
        self.other.append(verified - scored)

    def score(self, scratch: _Scratch, size: int) -> None:
        """One target forward over a chain of `size` nodes."""
        row, pattern, at = scratch.row, scratch.pattern, len(scratch.row.tokens)
        guess = [pattern[(at + i) % PERIOD] for i in range(size - 1)]
        draft = Draft(chain(row.tokens[-1], guess), Draw.POINT)
        began = perf_counter()
        scores = self.engine.target.score([row], [draft], self.engine.drafter.taps)
        _wait_for(scores[0].logits)
        self.target[size].append(perf_counter() - began)
        self.engine.target.commit([row], [()])
        scratch.go_on()

    def table(self) -> CostTable:
        return CostTable(
            {size: _settled(times) for size, times in sorted(self.target.items())},
            {depth: _settled(times) for depth, times in sorted(self.draft.items())},
            _settled(self.other or [0.0]),
        )


@endless
def always(row: DecodeState, law: Tensor, hidden: Tensor | None = None) -> int:
    """Lengths are measured one by one, whatever a controller would stop at."""
    return 1


def _settled(times: list[float]) -> float:
    """Lower quartile without the warm-up: what disturbs a forward only ever makes it longer."""
    times = sorted(times[1:] or times)
    return times[(len(times) - 1) // 4]


def _wait_for(values: Tensor) -> None:
    """On a GPU, the end of the work and not of its launch."""
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
