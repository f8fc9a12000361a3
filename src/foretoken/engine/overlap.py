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

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from foretoken.coins import Coins
from foretoken.engine.engine import Engine
from foretoken.engine.scheduling import Turns, lent, turns_here
from foretoken.engine.step import commit, plan, propose, score, step_of
from foretoken.errors import CapabilityError
from foretoken.trees.build import chain, undrafted
from foretoken.types import Budget, DecodeState, Draft, Laws, Rows, Scores, Step, Verdict

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


@dataclass(eq=False)
class OverlapEngine(Engine):
    """An engine with both models at work in every step; its threads end when it is idle."""

    pending: dict[int, Draft] = field(default_factory=dict)  # unjudged tokens of rows, by uid
    workers: Workers | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap == "threads":
            refuse_one_device(self.target, self.drafter.model.lm)  # type: ignore[attr-defined]

    def unpriced(self, count: int) -> bool:
        """Nothing is tried on rows whose pending tokens lie open in the draft model."""
        return False

    @property
    def overlap(self) -> str:
        """How both models run: in threads of their own, or in turn with the overlap modelled."""
        how: str = self.drafter.model.config.overlap  # type: ignore[attr-defined]
        return how

    @property
    def heeds(self) -> bool:
        """Nothing is given: what is drafted lies behind tokens that are not judged yet."""
        return False

    def advance(self, rows: Rows) -> Step:
        """One round: pending tokens are scored while the drafter goes on behind them."""
        began = perf_counter()
        held = [self.pending.get(row.uid, undrafted(row)) for row in rows]
        forks = [fork(row, draft) for row, draft in zip(rows, held, strict=True)]
        budgets = [
            Budget(0, 0) if ends(row, draft) else budget  # nothing is behind the end of a text
            for row, draft, budget in zip(rows, held, plan(rows, forks, self), strict=True)
        ]
        idle = all(min(budget.depth, budget.nodes) == 0 for budget in budgets)
        phase = (one_after_the_other if idle else self.both)(
            lambda: propose(forks, budgets, self),
            lambda: score(rows, held, self),
        )
        judged, verdicts = self.judge(rows, held, phase)
        emitted = commit(rows, held, verdicts, self)
        spent = perf_counter() - began
        models = phase.draft + phase.target
        seconds = phase.draft, phase.target, max(spent - models, 0.0), phase.hidden
        step = step_of(rows, held, phase.scores, verdicts, emitted, *seconds)
        self.drafter.observe(step)
        self.controller.observe(
            replace(
                step,
                drafts=tuple(draft for draft, _ in judged),
                verdicts=tuple(verdict for _, verdict in judged),
            )
        )
        return step

    def judge(
        self, rows: Rows, held: Sequence[Draft], phase: Phase
    ) -> tuple[list[tuple[Draft, Verdict]], list[Verdict]]:
        """Pending tokens and the first new one judged together, and what that says of the pending
        ones; where all stand, the other new ones are pending next.
        """
        drafts, laws = [], []
        for row, draft, ahead, said in zip(rows, held, phase.ahead, phase.scores, strict=True):
            laws.append(row.warp.laws(row.tokens, draft.tree, said.logits))
            judged, said.p = behind(draft, ahead, laws[-1])
            drafts.append(judged)
        found = self.verifier.verify(rows, drafts, phase.scores)
        verdicts = []
        for row, draft, ahead, said, law, verdict in zip(
            rows, held, phase.ahead, phase.scores, laws, found, strict=True
        ):
            said.p = law
            self.pending.pop(row.uid, None)
            if len(verdict.path) == len(draft.tree):  # the first new token stands
                verdict = Verdict(verdict.path[:-1], ahead.tree.tokens[1])
                self.pending[row.uid] = rest(ahead)
            verdicts.append(verdict)
        return list(zip(drafts, found, strict=True)), verdicts

    def both(self, propose: Propose, score: Score) -> Phase:
        """Draft and target at the same time, or in turn where that is only modelled."""
        if self.overlap == "emulated":
            phase = one_after_the_other(propose, score)
            return replace(phase, hidden=min(phase.draft, phase.target))
        if self.workers is None:
            self.workers = Workers()
        return self.workers.both(propose, score)

    def leave(self, rows: Rows) -> None:
        """As in any engine; what was pending goes, and the workers with the last row."""
        for row in rows:
            self.pending.pop(row.uid, None)
        super().leave(rows)
        if self.workers is not None and not self.running:
            self.workers.close()
            self.workers = None


def fork(row: DecodeState, draft: Draft) -> DecodeState:
    """The row as it will be if all of `draft` stands."""
    return replace(row, tokens=[*row.tokens, *draft.tree.tokens[1:]])


def ends(row: DecodeState, draft: Draft) -> bool:
    """Whether the text is over if all of `draft` stands."""
    return len(draft.tree) > 1 and draft.tree.tokens[-1] in row.params.eos


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


class Workers:
    """A thread for each model, with half of torch's threads each.

    How many threads torch uses is kept per thread. A fresh thread takes over the number set last,
    by whomever, once it is first asked for: hence the order here and in `settle_in`.
    """

    def __init__(self) -> None:
        self.drafting = ThreadPoolExecutor(1, "foretoken-draft")
        self.scoring = ThreadPoolExecutor(1, "foretoken-target")
        before = torch.get_num_threads()
        for worker in (self.drafting, self.scoring):
            worker.submit(settle_in, max(1, before // 2)).result()
        torch.set_num_threads(before)

    def both(self, propose: Propose, score: Score) -> Phase:
        """Both jobs at once; done when both are, for rows are only freed when nobody works."""
        began, turns = perf_counter(), turns_here()
        jobs = (
            self.drafting.submit(timed_inside, turns, propose),
            self.scoring.submit(timed_inside, turns, score),
        )
        try:
            (ahead, _), (scores, target) = jobs[0].result(), jobs[1].result()
        finally:
            wait(jobs)
        return Phase(ahead, scores, max(perf_counter() - began - target, 0.0), target)

    def close(self) -> None:
        """End both threads."""
        self.drafting.shutdown()
        self.scoring.shutdown()


def one_after_the_other(propose: Propose, score: Score) -> Phase:
    """In the caller's thread."""
    ahead, draft = timed(propose)
    scores, target = timed(score)
    return Phase(ahead, scores, draft, target)


def timed_inside(turns: Turns, job: Callable[[], Any]) -> tuple[Any, float]:
    """`timed` in a worker, whose leader holds these turns and waits for it."""
    with lent(turns):
        return timed(job)


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


def refuse_one_device(target: Any, draft: Any) -> None:
    """Two models on one GPU wait for each other, whoever starts them."""
    places = [getattr(lm, "device", None) for lm in (target, draft)]
    if places[0] is not None and places[0] == places[1] and places[0].type != "cpu":
        raise CapabilityError(
            "overlap='threads' was asked for with draft and target on one device.",
            f"models on {places[0]} run one after the other; nothing would overlap.",
            "put the draft on another device, pass overlap='emulated', or use method chain.",
        )
