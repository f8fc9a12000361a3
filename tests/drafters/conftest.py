"""Rows, and whole runs of the real loop over table models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from foretoken.coins import SeededCoins
from foretoken.contract import Drafter, Verifier, Views
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.nothing import Nothing
from foretoken.engine.engine import Engine, decode
from foretoken.lm.table import TableLM
from foretoken.native import look_ups
from foretoken.types import (
    DecodeState,
    Draft,
    SamplingParams,
    Scores,
    Step,
    StepTimes,
    Verdict,
)
from foretoken.verifiers.point import Point
from foretoken.warp import Warp


def make_row(prompt: Sequence[int], vocab: int, **options: object) -> DecodeState:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return DecodeState(
        list(prompt),
        len(prompt),
        params,
        SeededCoins(params.seed),
        Warp(params, len(prompt), vocab),
    )


def texts(
    target: TableLM,
    drafter: Drafter,
    rows: Sequence[DecodeState],
    *,
    verifier: Verifier | None = None,
    depth: int = 4,
    nodes: int | None = None,
    kind: type[Fixed] = Fixed,
) -> tuple[list[list[int]], list[Step]]:
    """New tokens of each row, and all steps."""
    controller = kind(Fixed.Config(depth=depth, nodes=nodes))
    scored_through = drafter.view if isinstance(drafter, Views) else target
    engine = Engine(scored_through, drafter, verifier or Point(), controller)
    records = list(decode(rows, engine))
    return [row.new_tokens for row in rows], records


def step_of(
    rows: Sequence[DecodeState],
    drafts: Sequence[Draft],
    verdicts: Sequence[Verdict],
    scores: Sequence[Scores] | None = None,
    seconds: float = 0.0,
) -> Step:
    """A round as a drafter sees it, whose rows took all that the verdicts say."""
    emitted = [
        [*(draft.tree.tokens[node] for node in verdict.path), verdict.next_token]
        for draft, verdict in zip(drafts, verdicts, strict=True)
    ]
    seen = scores or [Scores(torch.zeros(0))] * len(rows)
    times = StepTimes(len(rows), 1, 1, 0.0, seconds, 0.0)
    return Step(tuple(rows), tuple(drafts), tuple(seen), tuple(verdicts), tuple(emitted), times)


@pytest.fixture
def step() -> Callable[..., Step]:
    return step_of


@pytest.fixture
def row() -> Callable[..., DecodeState]:
    return make_row


@pytest.fixture(params=["in C", "in Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Look-ups with operations in C, where these can be had, and without."""
    if request.param == "in Python":
        monkeypatch.setattr(look_ups, "plain", lambda name: None)
    return str(request.param)


@pytest.fixture
def run() -> Callable[..., tuple[list[list[int]], list[Step]]]:
    return texts


@pytest.fixture
def plain(run: Callable) -> Callable[..., list[list[int]]]:
    """What the same rows become without any draft."""
    return lambda target, rows: run(target, Nothing(), rows)[0]


@pytest.fixture
def pair() -> tuple[TableLM, TableLM]:
    """A target over twelve tokens and a draft that agrees with it most of the time."""
    target = TableLM.random(vocab=12, order=2, seed=1, scale=1.5)
    noise = torch.randn(
        target.logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    return target, TableLM(target.logits + 0.7 * noise)


@pytest.fixture
def prompts() -> list[list[int]]:
    """Three prompts of different lengths, one of a single token."""
    cycle = itertools.cycle(range(11))
    return [[3], [next(cycle) for _ in range(5)], [next(cycle) for _ in range(17)]]


@pytest.fixture
def dead_ends() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A processor that lets nothing follow odd tokens, and never lets the argmax be one."""

    def forbid(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if int(ids[0, -1]) % 2:
            return torch.full_like(scores, -torch.inf)
        scores = scores.clone()
        scores[:, 1::2] -= 2.5
        return scores

    return forbid
