"""What steps cost on this machine: measured medians, corrected by every step that is run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

from foretoken.types import CostTable

DRIFT = 0.1  # share of a surprise that moves all sizes: clocks, neighbours, longer contexts
LOCAL = 0.1  # share of a surprise that moves the size it was seen at
SURPRISE = 2.0  # a pause of the machine counts as this factor at most


class Price:
    """Seconds by size (nodes of a target forward, depth of a draft), piecewise linear."""

    __slots__ = ("curve", "drift", "knots", "sizes")

    def __init__(self, table: Mapping[int, float]) -> None:
        assert table and min(table.values()) > 0.0, "a price list needs measured times"
        self.sizes = sorted(table)
        self.knots = [table[size] for size in self.sizes]
        self.drift = 1.0
        self.curve: list[float] = []  # seconds by size, before the drift
        self._draw(0, self.sizes[-1])

    def at(self, size: int) -> float:
        if size >= len(self.curve):
            self._draw(len(self.curve), 2 * size)
        return self.curve[size] * self.drift

    def seen(self, size: int, seconds: float) -> None:
        """Learn from one measured time."""
        ratio = seconds / self.at(size)
        ratio = min(max(ratio, 1.0 / SURPRISE), SURPRISE)
        self.drift *= math.pow(ratio, DRIFT)
        high = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        low = high if self.sizes[high] <= size or high == 0 else high - 1
        for knot in {low, high}:
            self.knots[knot] *= math.pow(ratio, LOCAL)
        first = self.sizes[low - 1] if low > 0 else 0
        last = self.sizes[high + 1] if high + 1 < len(self.sizes) else len(self.curve) - 1
        self._draw(first, last)

    def copy(self) -> Price:
        twin = Price(dict(zip(self.sizes, self.knots, strict=True)))
        twin.drift = self.drift
        return twin

    def _draw(self, first: int, last: int) -> None:
        """Refresh the curve from `first` to `last`, both included."""
        self.curve += [0.0] * (last + 1 - len(self.curve))
        for size in range(first, last + 1):
            self.curve[size] = self._line(size)

    def _line(self, size: int) -> float:
        sizes, knots = self.sizes, self.knots
        if size <= sizes[0]:
            return knots[0] * size / sizes[0]
        if len(sizes) == 1:
            return knots[0]
        high = min(bisect_left(sizes, size), len(sizes) - 1)
        low = high - 1
        slope = (knots[high] - knots[low]) / (sizes[high] - sizes[low])
        if size > sizes[high]:
            slope = max(slope, 0.0)
            return knots[high] + slope * (size - sizes[high])
        return knots[low] + slope * (size - sizes[low])


class Prices:
    """Target, draft and overhead of steps of one batch size."""

    __slots__ = ("draft", "drafted_overhead", "plain_overhead", "target")

    def __init__(self, costs: CostTable) -> None:
        self.target = Price(costs.target)
        # A drafter that costs nothing measurable still needs a positive price.
        self.draft = Price({k: max(v, 1e-9) for k, v in costs.draft.items()} or {1: 1e-9})
        self.plain_overhead = self.drafted_overhead = costs.overhead

    def copy(self) -> Prices:
        twin = Prices(CostTable({1: 1.0}, {}))
        twin.target, twin.draft = self.target.copy(), self.draft.copy()
        twin.plain_overhead = self.plain_overhead
        twin.drafted_overhead = self.drafted_overhead
        return twin

    def plain(self, rows: int) -> float:
        """Seconds of a step without any draft."""
        return self.target.at(rows) + self.plain_overhead

    def drafted(self, rows: int, depth: int, nodes: int) -> float:
        """Seconds of a step that drafts `nodes` nodes in all, `depth` deep at most."""
        return self.draft.at(depth) + self.target.at(rows + nodes) + self.drafted_overhead

    def seen_overhead(self, drafted: bool, seconds: float) -> None:
        """Learn the time outside both models; it never counts for more than a target forward."""
        seconds = min(seconds, self.target.at(1))
        if drafted:
            self.drafted_overhead += LOCAL * (seconds - self.drafted_overhead)
        else:
            self.plain_overhead += LOCAL * (seconds - self.plain_overhead)
