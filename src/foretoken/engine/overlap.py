"""Draft while the target verifies: PEARL (Liu et al., arXiv 2408.11850).

In one step the target scores a row's pending tokens, drafted before and not judged yet, while the
drafter goes on behind them. Then the pending tokens and the first new one are judged together. If
all stand, the other new ones are pending next; if not, they were drawn behind a text that is none,
and are dropped. A row without pending tokens is the paper's pre-verify, one with some its
post-verify. There is no bonus token where something was drafted: the first new one has its place.

Only time differs from drafting first and verifying then. A verdict never looks at tokens behind
those it judges, so the ones that stay keep their law; and a row's coins are used by the drafter
while the models run, by the verifier once both are done, never by two at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from foretoken.coins import Coins
from foretoken.engine import loop
from foretoken.engine.loop import Engine, clip
from foretoken.errors import CapabilityError
from foretoken.trees.build import chain, root
from foretoken.types import (
    DecodeState,
    Draft,
    Draw,
    Laws,
    Scores,
    StepRecord,
    StepTimes,
    Verdict,
)

Propose = Callable[[], list[Draft]]
Score = Callable[[], list[Scores]]


@dataclass(frozen=True, slots=True)
class Phase:
    """What both models did in one step, and their seconds."""

    ahead: list[Draft]
    scores: list[Scores]
    draft: float  # in threads, what the target had to wait for
    target: float
    hidden: float = 0.0


Both = Callable[[Propose, Score], Phase]


def decode(
    requests: Iterable[DecodeState], engine: Engine, max_rows: int = 16
) -> Iterator[StepRecord]:
    """As `loop.decode`, with both models at work in every step; threads end with the generator."""
    how: str = engine.drafter.config.overlap  # type: ignore[attr-defined]
    with {"threads": at_once, "emulated": in_turn}[how](engine) as both:
        advance = partial(step, both=both, pending={})
        yield from loop.decode(requests, engine, max_rows, advance)


def step(
    rows: Sequence[DecodeState], engine: Engine, both: Both, pending: dict[int, Draft]
) -> StepRecord:
    """One round; `pending` holds each row's unjudged tokens from one round to the next."""
    lm, drafter, controller = engine.target, engine.drafter, engine.controller
    began = perf_counter()
    held = [pending.pop(row.uid, Draft(root(row.tokens[-1]), Draw.POINT)) for row in rows]
    forks = [fork(row, draft) for row, draft in zip(rows, held, strict=True)]
    budgets = [clip(f, b, lm) for f, b in zip(forks, controller.budgets(rows), strict=True)]
    idle = all(min(budget.depth, budget.nodes) == 0 for budget in budgets)
    phase = (one_after_the_other if idle else both)(
        lambda: drafter.propose(forks, budgets, controller.keep_going),
        lambda: lm.score(rows, held, drafter.taps),
    )
    verdicts, emitted = [], []
    for row, draft, ahead, score in zip(rows, held, phase.ahead, phase.scores, strict=True):
        laws = row.warp.laws(row.tokens, draft.tree, score.logits)
        judged, score.p = behind(draft, ahead, laws)
        verdict = engine.verifier.verify(judged, score, row.coins)
        score.p = laws
        controller.update(row, judged, verdict)
        if len(verdict.path) == len(draft.tree):  # the first new token stands
            verdict = Verdict(verdict.path[:-1], ahead.tree.tokens[1])
            pending[row.uid] = rest(ahead)
        verdicts.append(verdict)
    lm.commit(rows, [verdict.path for verdict in verdicts])
    for row, draft, verdict in zip(rows, held, verdicts, strict=True):
        accepted = [draft.tree.tokens[node] for node in verdict.path]
        emitted.append(row.extend([*accepted, verdict.next_token]))
        if row.finish is not None:
            pending.pop(row.uid, None)
    drafter.observe(rows, held, phase.scores, verdicts)
    spent = perf_counter() - began
    models = phase.draft + phase.target
    times = StepTimes(
        rows=len(rows),
        nodes=sum(len(draft.tree) for draft in held),
        context=max(len(row.tokens) for row in rows),
        draft=phase.draft,
        target=phase.target,
        other=max(spent - models, 0.0),
        hidden=phase.hidden,
    )
    controller.timed(times)
    record = StepRecord(tuple(rows), tuple(held), tuple(verdicts), tuple(emitted), times)
    for listener in engine.listeners:
        listener(record)
    return record


def fork(row: DecodeState, draft: Draft) -> DecodeState:
    """The row as it will be if all of `draft` stands."""
    return replace(row, tokens=[*row.tokens, *draft.tree.tokens[1:]])


def behind(held: Draft, ahead: Draft, laws: Laws) -> tuple[Draft, Laws]:
    """The pending tokens and the first one drafted behind them, with the laws to judge them by."""
    size = len(held.tree)
    if len(ahead.tree) == 1:
        return held, laws
    assert ahead.tree.is_chain, "only chains are drafted ahead"
    tokens = (*held.tree.tokens[1:], ahead.tree.tokens[1])
    q = None
    if ahead.q is not None:
        q = (*(held.q or (None,))[:-1], ahead.q[0], None)
    return Draft(chain(held.tree.tokens[0], tokens), ahead.draw, q), Unscored(laws, size)


def rest(ahead: Draft) -> Draft:
    """What was drafted behind the first new token, which is the row's last one now."""
    _, first, *others = ahead.tree.tokens
    return Draft(chain(first, others), ahead.draw, None if ahead.q is None else ahead.q[1:])


class Unscored:
    """Laws of a chain whose last node, `end`, was not scored.

    A rule asks for that law only when the whole chain stands, to draw a bonus token. That draw is
    thrown away: token 0 stands in for it, for certain.
    """

    def __init__(self, laws: Laws, end: int) -> None:
        self.laws, self.end, self.greedy = laws, end, laws.greedy

    def __getitem__(self, node: int) -> Tensor:
        if node < self.end:
            return self.laws[node]
        certain = torch.zeros_like(self.laws[0])
        certain[0] = 1.0
        return certain

    def draw(self, node: int, coins: Coins) -> int:
        return self.laws.draw(node, coins) if node < self.end else 0


@contextmanager
def at_once(engine: Engine) -> Iterator[Both]:
    """A worker thread for each model, with half of torch's threads each.

    How many threads torch uses is kept per thread. A fresh thread takes over the number set last,
    by whomever, once it is first asked for: hence the order here and in `settle_in`.
    """
    refuse_one_device(engine)
    before = torch.get_num_threads()
    with (
        ThreadPoolExecutor(1, "foretoken-draft") as drafting,
        ThreadPoolExecutor(1, "foretoken-target") as scoring,
    ):
        for worker in (drafting, scoring):
            worker.submit(settle_in, max(1, before // 2)).result()
        torch.set_num_threads(before)

        def both(propose: Propose, score: Score) -> Phase:
            began = perf_counter()
            jobs = drafting.submit(timed, propose), scoring.submit(timed, score)
            try:
                (ahead, _), (scores, target) = jobs[0].result(), jobs[1].result()
            finally:
                wait(jobs)  # rows may only be freed when nobody works on them
            return Phase(ahead, scores, max(perf_counter() - began - target, 0.0), target)

        yield both


@contextmanager
def in_turn(engine: Engine) -> Iterator[Both]:
    """The same step on one device: what the shorter of both takes would have passed unnoticed."""

    def both(propose: Propose, score: Score) -> Phase:
        phase = one_after_the_other(propose, score)
        return replace(phase, hidden=min(phase.draft, phase.target))

    yield both


def one_after_the_other(propose: Propose, score: Score) -> Phase:
    """In the caller's thread."""
    ahead, draft = timed(propose)
    scores, target = timed(score)
    return Phase(ahead, scores, draft, target)


def settle_in(threads: int) -> None:
    torch.get_num_threads()
    torch.set_num_threads(threads)


def timed(job: Callable[[], Any]) -> tuple[Any, float]:
    """What `job` returns, and its seconds, the device's work included."""
    began = perf_counter()
    with torch.inference_mode():  # set per thread
        done = job()
    if isinstance(done[0], Scores) and done[0].logits.is_cuda:
        torch.cuda.synchronize(done[0].logits.device)
    return done, perf_counter() - began


def refuse_one_device(engine: Engine) -> None:
    """Two models on one GPU wait for each other, whoever starts them."""
    places = [getattr(lm, "device", None) for lm in (engine.target, engine.drafter.lm)]  # type: ignore[attr-defined]
    if places[0] is not None and places[0] == places[1] and places[0].type != "cpu":
        raise CapabilityError(
            "overlap='threads' was asked for with draft and target on one device.",
            f"models on {places[0]} run one after the other; nothing would overlap.",
            "put the draft on another device, pass overlap='emulated', or use method chain.",
        )
