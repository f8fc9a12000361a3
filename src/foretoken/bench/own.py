"""Our methods as rows of a bench: one prompt, one clock, through the loop that sessions run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol, cast, runtime_checkable

import torch

from foretoken.bench.rows import RowSpec
from foretoken.coins import SeededCoins
from foretoken.contract import Reports
from foretoken.engine.beam import BeamRecord
from foretoken.engine.beam import decode as decode_beams
from foretoken.engine.engine import Engine, decode
from foretoken.engine.record import StepTrace, trace_of
from foretoken.row import make_row
from foretoken.trees.forest import BeamRow
from foretoken.types import DecodeState, Rows, SamplingParams


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One text and what it cost. Seconds run from prompt ids to the last new id, for everybody."""

    tokens: list[int]  # new ids, up to and with the end token
    seconds: float
    prefill: float | None = None  # None: the row cannot tell
    draft: float | None = None
    target: float | None = None
    steps: list[tuple[int, int, int, int]] = field(default_factory=list)
    #   per target forward: nodes drafted, depth drafted, accepted, emitted
    forwards: int | None = None  # target forwards that gave tokens, counted for every text in them
    rounds: int | None = None  # and counted once; None: as many
    each: list[tuple[int, int]] = field(default_factory=list)
    #   of texts written at once: tokens, and forwards that gave some; 0: the row cannot tell
    texts: int | None = None  # beams only: how many texts were written
    score: float | None = None  # beams only: mean log-likelihood of a token of the best one
    memory: int | None = None  # peak of a process of its own, where the row has one


class Row(Protocol):
    """A decoder under the bench's clock: one of our methods, or a form of `generate`."""

    spec: RowSpec
    note: str  # what a reader has to know: the setting chosen, say

    def write(self, prompt: Sequence[int], params: SamplingParams) -> Outcome: ...


@runtime_checkable
class Together(Protocol):
    """A row that can write the texts of several requests at once; its outcome holds them all, one
    after the other, and a step is one row's."""

    def write_together(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Outcome: ...


class OwnRow:
    """A method through the same loop that `Session.generate` runs."""

    def __init__(self, spec: RowSpec, engine: Engine) -> None:
        self.spec, self.engine = spec, engine

    @property
    def note(self) -> str:
        """What the drafter has to tell by now."""
        drafter = self.engine.drafter
        return drafter.report() if isinstance(drafter, Reports) else ""

    def write(self, prompt: Sequence[int], params: SamplingParams) -> Outcome:
        return self.write_together([prompt], [params])

    def write_together(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Outcome:
        """Texts of prompts that arrive at once."""
        rows = [request(*one, self.engine) for one in zip(prompts, params, strict=True)]
        self.engine.max_rows = max(self.engine.max_rows, len(rows))
        found: list[StepTrace] = []
        shared: list[Rows] = []
        fed = draft = target = 0.0
        began = perf_counter()
        for step in decode(rows, self.engine):
            shared.append(step.rows)
            fed += step.times.prefill
            draft, target = draft + step.times.draft, target + step.times.target
            found += [trace_of(step, at) for at in range(len(step.rows))]
        finish_device()
        seconds = perf_counter() - began
        steps = Counter(row.uid for together in shared for row in together)
        each = [(len(row.new_tokens), steps[row.uid]) for row in rows]
        return Outcome(
            tokens=[token for row in rows for token in row.new_tokens],
            seconds=seconds,
            # Prompts share some forwards, so only the steps know what those of all took together.
            prefill=rows[0].prefill if len(rows) == 1 else fed,
            draft=draft,
            target=target,
            steps=[(t.drafted, t.depth, t.accepted, len(t.emitted)) for t in found],
            forwards=len(found),
            rounds=len(shared),
            each=each if len(rows) > 1 else [],
        )


class BeamsRow:
    """A method that writes several scored texts: tokens of the best one, seconds of all of them.

    A step counts layers: so many were drafted, so many stood, and every beam grew by so many.
    """

    def __init__(self, spec: RowSpec, engine: Engine) -> None:
        self.spec, self.engine = spec, engine
        self.width: int = cast(Any, engine.verifier).config.num_beams

    @property
    def note(self) -> str:
        return (
            f"up to {self.width} scored texts per prompt (one at temperature 0); counted are the "
            "tokens of the best text, over the seconds that all texts took"
        )

    def write(self, prompt: Sequence[int], params: SamplingParams) -> Outcome:
        row = BeamRow(request(prompt, params, self.engine), self.width)
        steps: list[tuple[int, int, int, int]] = []
        draft = target = prefill = 0.0
        began = perf_counter()
        for record in decode_beams([row], cast(Any, self.engine)):
            self._count(record, steps)
            if len(steps) == 1:  # the prompt's forward, and the first round's own judging
                prefill = perf_counter() - began - record.draft_seconds - record.target_seconds
            draft, target = draft + record.draft_seconds, target + record.target_seconds
        finish_device()
        best = max(row.written, key=lambda text: text.score)
        return Outcome(
            tokens=list(best.tokens),
            seconds=perf_counter() - began,
            prefill=prefill,
            draft=draft,
            target=target,
            steps=steps,
            forwards=len(steps),
            texts=min(len(row.written), self.width),
            score=best.score,
        )

    @staticmethod
    def _count(record: BeamRecord, steps: list[tuple[int, int, int, int]]) -> None:
        (done,) = record.rounds
        steps.append((len(done.layers), len(done.layers), done.grown - 1, done.grown))


class Waiting:
    """A target on a GPU whose `score` returns when the work is done, not when it is launched.

    The loop's clock then books a forward under target; else whoever first reads a number pays.
    """

    def __init__(self, lm: Any) -> None:
        self._lm = lm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def score(self, *given: Any) -> Any:
        scores = self._lm.score(*given)
        finish_device()
        return scores


def request(prompt: Sequence[int], params: SamplingParams, engine: Engine) -> DecodeState:
    """A prompt as the loop takes it, with the coins of its seed and no promise to repeat a text.

    A row that promises that goes without the clock and what other rows found: users who name no
    seed, which are most, have both.
    """
    coins = SeededCoins(params.seed)
    return make_row(prompt, replace(params, seed=None), coins, engine.target.vocab_size)


def finish_device() -> None:
    """Wait for the GPU, where there is one: a clock read earlier would flatter."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
