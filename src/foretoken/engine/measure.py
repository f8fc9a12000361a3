"""What forwards cost on this machine: interleaved repeats behind a short context."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import replace
from time import perf_counter

import torch

from foretoken.coins import SeededCoins
from foretoken.controllers.fixed import Fixed
from foretoken.engine.batch_costs import AHEAD
from foretoken.engine.engine import Engine
from foretoken.engine.step import (
    Parts,
    commit,
    judge,
    learn,
    propose_timed,
    score,
    step_of,
)
from foretoken.engine.timings import TOO_DEAR, settled, timed_before, wait_for
from foretoken.row import make_row
from foretoken.trees.build import chain
from foretoken.types import (
    Budget,
    CostTable,
    DecodeState,
    Draft,
    Draw,
    SamplingParams,
    Shape,
    Verdict,
)

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
    trees and large batches, which correct the table as they run. What forwards of the target cost
    is measured once for all methods around it.
    """
    room = longest_text(engine)
    if room is not None:
        context = max(1, min(context, room // 2))
    known = {
        size: cost
        for size, cost in timed_before(engine.target).items()
        if room is None or context + REPEATS + size <= room
    }
    sizes = [size for size in SIZES if size not in known]
    trees = engine.drafter.traits.shape is Shape.TREE
    watch = Stopwatch(engine)
    began = perf_counter()
    rounds, done = 1 + REPEATS, 0
    while done < rounds:
        with closing(ScratchRow(engine, context)) as scratch:
            for depth in DEPTHS:
                budget = Budget(depth, 2 * depth if trees else depth)
                if depth <= max_depth and scratch.fits(1 + budget.nodes):
                    watch.step(scratch, budget)
            if engine.drafter.traits.prices and scratch.fits(3):  # and one more behind it
                watch.ask(scratch, Budget(max_depth, max_depth, TOO_DEAR))
            for size in sizes:
                if scratch.fits(size):
                    watch.score(scratch, size)
        done += 1
        if done == 1:  # the first round warms every shape up
            took = perf_counter() - began
            if took > seconds / 3 and not trees:
                sizes = [size for size in sizes if size <= SLOW_SIZES]
            rounds = 1 + max(1, min(REPEATS, int(seconds / max(took, 1e-9)) - 1))
    table = watch.table()
    timed_before(engine.target).update(table.target)
    target = dict(sorted({**table.target, **known}.items()))
    return replace(table, target=target, cached=context)


def longest_text(engine: Engine) -> int | None:
    """Tokens that a text may have, by the target's positions and the memory; None: any number."""
    rooms = (engine.target.max_length, engine.waiting.longest)
    return min([one for one in rooms if one is not None], default=None)


@torch.inference_mode()
def measure_batches(engine: Engine, tokens: int = 2048) -> None:
    """Let the controller know what batches cost before there is one: of 2, 4, 8, ... rows, as many
    as run together at most, whose texts have about so many tokens altogether.

    Else each size is tried on the first rows that it is met with, which wait for it; so are those
    that a memory budget has no room for here.
    """
    most, room = engine.max_rows, engine.target.max_length
    context = min(128, max(tokens // most, 8))
    context = context if room is None else max(1, min(context, room // 2))
    with ExitStack() as opened:
        rows: list[DecodeState] = []
        for size in [1 << bit for bit in range(1, most.bit_length())]:
            if engine.unpriced(size) and engine.waiting.affords(context, 1 + 2 * AHEAD[-1], size):
                for _ in range(size - len(rows)):
                    rows.append(opened.enter_context(closing(ScratchRow(engine, context))).row)
                engine.try_out(rows)
                if size.bit_length() in engine.untried:
                    break  # larger ones need more


class ScratchRow:
    """A row that exists for measuring only; its text repeats itself."""

    def __init__(self, engine: Engine, context: int) -> None:
        self.engine = engine
        vocab = engine.target.vocab_size
        self.pattern = [(3 + 7 * i) % vocab for i in range(PERIOD)]
        tokens = [self.pattern[i % PERIOD] for i in range(context)]
        params = SamplingParams(max_new_tokens=10**6)
        self.row = make_row(tokens, params, SeededCoins(0), vocab)
        self.row.rehearsal = True
        traits = engine.drafter.traits
        try:
            [seen] = engine.target.prefill([self.row], traits.taps, last=traits.context)
            engine.drafter.start(self.row, seen)
        except BaseException:  # nobody could close it
            engine.leave([self.row])
            raise

    def fits(self, nodes: int) -> bool:
        room, tokens = self.engine.target.max_length, len(self.row.tokens)
        long = room is not None and tokens - 1 + nodes > room
        return not long and self.engine.waiting.affords(tokens, nodes)

    def go_on(self) -> int:
        """The next token of the text, whatever was scored."""
        return self.pattern[len(self.row.tokens) % PERIOD]

    def close(self) -> None:
        self.engine.leave([self.row])


class Stopwatch:
    """Collects times; the first of each kind is a warm-up."""

    def __init__(self, engine: Engine) -> None:
        # Lengths are measured one by one, whatever a controller would stop at.
        self.parts = Parts(engine.target, engine.drafter, engine.verifier, Fixed())
        self.target: dict[int, list[float]] = defaultdict(list)
        self.draft: dict[int, list[float]] = defaultdict(list)
        self.other: list[float] = []
        self.asking: list[float] = []

    def step(self, scratch: ScratchRow, budget: Budget) -> None:
        """A whole step with a draft of this size, of which nothing is accepted."""
        rows, parts = [scratch.row], self.parts
        proposed = propose_timed(rows, [budget], parts)
        drafts, drafted = proposed.drafts, perf_counter()
        scores = score(rows, drafts, parts)
        wait_for(scores[0].logits)
        scored = perf_counter()
        judge(rows, drafts, scores, parts)
        verdicts = [Verdict((), scratch.go_on())]
        emitted = commit(rows, drafts, verdicts, parts)
        ended = perf_counter()
        seconds = proposed.seconds, scored - drafted, ended - scored
        step = step_of(rows, drafts, scores, verdicts, emitted, *seconds)
        learn(step, parts)
        deepest = max(drafts[0].tree.depths())
        if deepest:
            self.draft[deepest].append(step.times.draft)
        self.target[step.times.nodes].append(step.times.target / scores[0].share)
        self.other.append(step.times.other)

    def ask(self, scratch: ScratchRow, budget: Budget) -> None:
        """A proposal where nothing is worth its price: what asking alone costs."""
        proposed = propose_timed([scratch.row], [budget], self.parts)
        self.asking.append(proposed.seconds)
        self.target_once(scratch, proposed.drafts[0])

    def score(self, scratch: ScratchRow, size: int) -> None:
        """One target forward over a chain of `size` nodes."""
        row, pattern, at = scratch.row, scratch.pattern, len(scratch.row.tokens)
        guess = [pattern[(at + i) % PERIOD] for i in range(size - 1)]
        draft = Draft(chain(row.tokens[-1], guess), Draw.POINT)
        self.target[size].append(self.target_once(scratch, draft))

    def target_once(self, scratch: ScratchRow, draft: Draft) -> float:
        """Seconds of one target forward over a draft, of which nothing is accepted."""
        rows = [scratch.row]
        began = perf_counter()
        scores = score(rows, [draft], self.parts)
        wait_for(scores[0].logits)
        took = perf_counter() - began
        commit(rows, [draft], [Verdict((), scratch.go_on())], self.parts)
        return took

    def table(self) -> CostTable:
        return CostTable(
            {size: settled(times) for size, times in sorted(self.target.items())},
            {depth: settled(times) for depth, times in sorted(self.draft.items())},
            settled(self.other or [0.0]),
            settled(self.asking or [0.0]),
        )
