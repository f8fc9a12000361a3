"""Steps as controllers see them, for simulated machines."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretoken.types import DecodeState, Draft, Scores, Step, StepTimes, Verdict


def step_of(
    rows: Sequence[DecodeState],
    drafts: Sequence[Draft],
    verdicts: Sequence[Verdict],
    times: StepTimes,
) -> Step:
    """A step; what was scored is nobody's concern here."""
    scores = tuple(Scores(torch.empty(0)) for _ in rows)
    emitted = tuple([0] * (len(verdict.path) + 1) for verdict in verdicts)
    return Step(tuple(rows), tuple(drafts), scores, tuple(verdicts), emitted, times)
