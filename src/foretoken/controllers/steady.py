"""What controllers share that learn nothing while they run."""

from __future__ import annotations

from foretoken.types import CostTable, DecodeState, Draft, StepTimes, Verdict


class Steady:
    """Base: neither costs nor outcomes nor times change what it says."""

    needs_costs = False

    def learn(self, costs: CostTable) -> None:
        return None

    def update(self, row: DecodeState, draft: Draft, verdict: Verdict) -> None:
        return None

    def timed(self, times: StepTimes) -> None:
        return None
