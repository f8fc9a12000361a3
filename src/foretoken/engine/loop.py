"""The loop: draft, score, verify, commit, learn. Every method that fits the types runs here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from foretoken.engine.pairing import check_pairing, check_reading
from foretoken.types import (
    Budget,
    Controller,
    DecodeState,
    Drafter,
    LanguageModel,
    StepRecord,
    StepTimes,
    Verifier,
)

Listener = Callable[[StepRecord], None]
Loop = Callable[..., Iterator[StepRecord]]  # (requests, engine, max_rows)
Step = Callable[[Sequence[DecodeState], "Engine"], StepRecord]


@dataclass(slots=True)
class Engine:
    """Target, drafter, rule and controller that fit together (PairingError if they do not)."""

    target: LanguageModel
    drafter: Drafter
    verifier: Verifier
    controller: Controller
    listeners: list[Listener] = field(default_factory=list)
    loop: Loop | None = None  # None: `decode`

    def __post_init__(self) -> None:
        check_pairing(self.target, self.drafter, self.verifier)
        check_reading(self.drafter, self.controller)

    def run(self, requests: Iterable[DecodeState], max_rows: int = 16) -> Iterator[StepRecord]:
        """Run rows to their end under this engine's own loop."""
        return (self.loop or decode)(requests, self, max_rows)


def step(rows: Sequence[DecodeState], engine: Engine) -> StepRecord:
    """One round. Every row grows by at least one token."""
    lm, drafter, verifier, controller = (
        engine.target,
        engine.drafter,
        engine.verifier,
        engine.controller,
    )
    began = perf_counter()
    budgets = [clip(row, b, lm) for row, b in zip(rows, controller.budgets(rows), strict=True)]
    drafting = perf_counter()
    drafts = drafter.propose(rows, budgets, controller.keep_going)
    drafted = perf_counter()
    scores = lm.score(rows, drafts, drafter.taps)  # the only target forward
    scored = perf_counter()
    for row, draft, score in zip(rows, drafts, scores, strict=True):
        score.p = row.warp.laws(row.tokens, draft.tree, score.logits)  # the same warp that made q
    verdicts = [
        verifier.verify(draft, score, row.coins)
        for row, draft, score in zip(rows, drafts, scores, strict=True)
    ]
    lm.commit(rows, [verdict.path for verdict in verdicts])
    emitted = []
    for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
        accepted = [draft.tree.tokens[node] for node in verdict.path]
        emitted.append(row.extend([*accepted, verdict.next_token]))
        controller.update(row, draft, verdict)
    verified = perf_counter()
    drafter.observe(rows, drafts, scores, verdicts)
    ended = perf_counter()
    times = StepTimes(
        rows=len(rows),
        nodes=sum(len(draft.tree) for draft in drafts),
        context=max(len(row.tokens) for row in rows),
        draft=(drafted - drafting) + (ended - verified),
        target=scored - drafted,
        other=(drafting - began) + (verified - scored),
    )
    controller.timed(times)
    record = StepRecord(tuple(rows), tuple(drafts), tuple(verdicts), tuple(emitted), times)
    for listener in engine.listeners:
        listener(record)
    return record


def clip(row: DecodeState, budget: Budget, lm: LanguageModel) -> Budget:
    """A budget that neither outruns the row's cap nor the model's positions."""
    depth = min(budget.depth, row.room - 1)  # the verdict adds one token beyond the path
    if lm.max_length is not None:
        depth = min(depth, lm.max_length - len(row.tokens))
    if depth == budget.depth:
        return budget
    return replace(budget, depth=depth) if depth > 0 else Budget(0, 0)


def decode(
    requests: Iterable[DecodeState], engine: Engine, max_rows: int = 16, advance: Step = step
) -> Iterator[StepRecord]:
    """Run rows to their end, at most `max_rows` together; a waiting row enters as one leaves.

    Closing the generator early frees every row. `advance` takes all running rows one round further.
    """
    waiting, running = deque(requests), []
    try:
        while waiting or running:
            while waiting and len(running) < max_rows:
                row = waiting.popleft()
                running.append(row)
                admit(row, engine)
            with torch.inference_mode():
                record = advance(running, engine)
            leave([row for row in running if row.finish is not None], engine)
            running = [row for row in running if row.finish is None]
            yield record
    finally:
        leave(running, engine)


@torch.inference_mode()  # buffers are made inside; who trains on features clones them
def admit(row: DecodeState, engine: Engine) -> None:
    """Cache the prompt and let the drafter see it."""
    seen = engine.target.prefill(row, engine.drafter.taps)
    engine.drafter.start(row, seen)


def leave(rows: Sequence[DecodeState], engine: Engine) -> None:
    """Forget rows that ended."""
    for row in rows:
        engine.drafter.finish(row)
    if rows:
        engine.target.free(rows)
