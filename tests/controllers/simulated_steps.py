"""Steps as controllers see them, for simulated machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from foretoken.types import CostTable, DecodeState, Draft, Scores, Step, StepTimes, Verdict

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes whose costs are told
PRICES = CostTable({1: 1.0, 2: 1.02, 8: 1.2, 64: 3.0}, {1: 0.1, 4: 0.4}, 0.02)


class OwnClock:
    """A controller with a clock of its own, so that runs can be repeated and enumerated: put
    before its class.
    """

    def lacks(self, rows: int) -> bool:
        return False  # no other clock measures batches

    def observe(self, step: Step) -> None:
        depth = max(max(draft.tree.depths()) for draft in step.drafts)
        times = StepTimes(step.times.rows, step.times.nodes, 1, 0.1 * depth, 1.0, 0.02)
        base: Any = super()
        base.observe(replace(step, times=times))


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
