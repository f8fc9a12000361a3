"""What speculation saves: the seconds that plain steps would have taken for the same tokens.

A plain step is one in which nothing is drafted. Its cost is what such steps of as many rows took in
this server (a running mean); until one was seen, what the target's forward over as many nodes was
measured to take at start; where neither is known, tokens per step stand for the speed-up, as if a
drafted step cost no more than a plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.types import Step

WEIGHT = 0.1  # of the step seen last
NOTHING = 0.01  # share of a step up to which no prompt was fed before it
SEEN, MEASURED, COUNTED = "plain steps of this server", "forwards timed at start", "tokens per step"


class PlainSteps:
    """Seconds of plain steps by the number of rows."""

    def __init__(self, forwards: Mapping[int, float]) -> None:
        self.forwards = dict(sorted(forwards.items()))  # seconds by nodes scored, as timed before
        self.seen: dict[int, float] = {}

    def step(self, step: Step) -> None:
        """Learn from a step in which nothing was drafted."""
        times = step.times
        fed = times.prefill > NOTHING * times.whole  # looking who waits takes some, too
        if times.nodes != times.rows or fed:
            return
        before = self.seen.get(times.rows)
        took = times.whole
        self.seen[times.rows] = took if before is None else before + WEIGHT * (took - before)

    def seconds(self, rows: int) -> tuple[float | None, str]:
        """What a plain step of so many rows takes, and how that is known."""
        if rows in self.seen:
            return self.seen[rows], SEEN
        near = [cost for nodes, cost in self.forwards.items() if nodes >= rows]
        if near:
            return near[0], MEASURED
        return None, COUNTED


class Estimate:
    """One text's speed-up, step by step."""

    def __init__(self, plain: PlainSteps) -> None:
        self.plain = plain
        self.instead = 0.0  # seconds that plain steps would have taken
        self.took = 0.0
        self.steps = self.tokens = 0
        self.how = COUNTED

    def step(self, step: Step, tokens: int) -> None:
        """Take in a step that wrote so many tokens of the text."""
        cost, how = self.plain.seconds(step.times.rows)
        self.steps += 1
        self.tokens += tokens
        if cost is not None:
            self.instead += cost * tokens
            self.took += step.times.whole
            self.how = how

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        known = self.took > 0.0
        speedup = self.instead / self.took if known else self.tokens / max(self.steps, 1)
        return {"speedup": round(speedup, 4), "how": self.how if known else COUNTED}
