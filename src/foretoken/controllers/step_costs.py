"""What steps cost on this machine: measured medians, corrected by every step that is run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

from foretoken.types import CostTable

DRIFT = 0.1  # share of a surprise that moves all sizes: clocks, neighbours, longer contexts
LOCAL = 0.1  # share of a surprise that moves the size it was seen at
SURPRISE = 2.0  # a pause of the machine counts as this factor at most


class CostCurve:
    """Seconds by size (nodes of a target forward, depth of a draft), piecewise linear."""

    __slots__ = ("curve", "drift", "knots", "sizes", "tried")

    def __init__(self, table: Mapping[int, float]) -> None:
        assert table and min(table.values()) > 0.0, "a cost curve needs measured times"
        self.sizes = sorted(table)
        self.knots = [table[size] for size in self.sizes]
        self.drift = 1.0
        self.tried = 0  # knots up to here were corrected by steps of their own size
        self.curve: list[float] = []  # seconds by size, before the drift
        self._draw(0, self.sizes[-1])

    def at(self, size: int) -> float:
        curve, drift = self.reach(size)
        return curve[size] * drift

    def reach(self, size: int) -> tuple[list[float], float]:
        """The curve at least up to `size`, and the factor that makes seconds of it."""
        if size >= len(self.curve):
            self._draw(len(self.curve), 2 * size)
        return self.curve, self.drift

    def seen(self, size: int, seconds: float) -> None:
        """Learn from one measured time.

        Sizes beyond all that were run follow the largest that was: where a table measured on a
        busy machine has them too dear, nobody would ever run them and learn better.
        """
        ratio = seconds / self.at(size)
        ratio = min(max(ratio, 1.0 / SURPRISE), SURPRISE)
        self.drift *= math.pow(ratio, DRIFT)
        high = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        low = high if self.sizes[high] <= size or high == 0 else high - 1
        self.tried = max(self.tried, high)
        alone = high == 0  # one node is multiplied by other kernels, and tells of no larger size
        follow = high == self.tried and not alone
        for knot in range(low, len(self.knots) if follow else high + 1):
            self.knots[knot] *= math.pow(ratio, LOCAL)
        first = self.sizes[low - 1] if low > 0 else 0
        inside = high + 1 < len(self.sizes) and not follow
        self._draw(first, self.sizes[high + 1] if inside else len(self.curve) - 1)

    def copy(self) -> CostCurve:
        twin = CostCurve(dict(zip(self.sizes, self.knots, strict=True)))
        twin.drift, twin.tried = self.drift, self.tried
        return twin

    def _draw(self, first: int, last: int) -> None:
        """Refresh the curve from `first` to `last`, both included."""
        sizes, knots, curve = self.sizes, self.knots, self.curve
        curve += [0.0] * (last + 1 - len(curve))
        size = first
        while size <= last:
            high = bisect_left(sizes, size)
            if high == 0:
                start, value, slope, end = 0, 0.0, knots[0] / sizes[0], sizes[0]
            elif high == len(sizes):
                start, value, end = sizes[-1], knots[-1], last
                slope = 0.0
                if high > 1:
                    slope = max((value - knots[-2]) / (start - sizes[-2]), 0.0)
            else:
                start, value, end = sizes[high - 1], knots[high - 1], sizes[high]
                slope = (knots[high] - value) / (end - start)
            end = min(end, last)
            for at in range(size, end + 1):
                curve[at] = value + slope * (at - start)
            size = end + 1


class StepCosts:
    """Seconds of steps of one batch size: drafting, and all the rest by nodes scored.

    What a step does outside both models is counted with the target: on a GPU the time of a forward
    is waited for wherever its result is read first.
    """

    __slots__ = ("draft", "rest")

    def __init__(self, rest: CostCurve, draft: CostCurve) -> None:
        self.rest, self.draft = rest, draft

    @classmethod
    def of(cls, costs: CostTable) -> StepCosts:
        scored = convex(costs.target)
        rest = CostCurve({n: seconds + costs.overhead for n, seconds in scored.items()})
        # A drafter that costs nothing measurable still needs a positive price.
        draft = {d: max(seconds, 1e-9) for d, seconds in hull_of(rising(costs.draft)).items()} or {
            1: 1e-9
        }
        if len(draft) == 1:  # a forward per level: the next levels cost as much again
            draft |= {2 * d: 2.0 * seconds for d, seconds in draft.items()}
        return cls(rest, CostCurve(draft))

    def copy(self) -> StepCosts:
        return StepCosts(self.rest.copy(), self.draft.copy())

    def plain(self, rows: int) -> float:
        """Seconds of a step without any draft."""
        return self.rest.at(rows)

    def drafted(self, rows: int, depth: int, nodes: int) -> float:
        """Seconds of a step that drafts `nodes` nodes in all, `depth` deep at most."""
        return self.draft.at(depth) + self.rest.at(rows + nodes)


def convex(measured: Mapping[int, float]) -> dict[int, float]:
    """The largest curve below all points that never falls and, beyond one node, gets no flatter.

    Scoring costs reading the weights first, arithmetic later, so that is its shape. One node alone
    is multiplied by other kernels than several, so its cost stands for itself: what the second one
    adds may be more than any further one does. What disturbs a measurement makes it longer: a
    single bad one would hide a size from the controller for good, since a size that looks too dear
    is never tried again.
    """
    least = rising(measured)
    if 1 in least and len(least) > 1:
        return {1: least.pop(1)} | hull_of(least)
    return hull_of(least)


def rising(measured: Mapping[int, float]) -> dict[int, float]:
    """By size, the least that it or a larger one was measured at."""
    sizes = sorted(measured)
    return {n: min(measured[m] for m in sizes[at:]) for at, n in enumerate(sizes)}


def hull_of(rising: Mapping[int, float]) -> dict[int, float]:
    """The largest convex curve below points that never fall."""
    sizes = list(rising)
    hull: list[tuple[int, float]] = []
    for size, low in rising.items():
        while len(hull) > 1 and slope(hull[-2], (size, low)) <= slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((size, low))
    found, at = {}, 0
    for size in sizes:
        while hull[at][0] < size:
            at += 1
        right = hull[at]
        left = hull[max(at - 1, 0)]
        found[size] = (
            right[1] if right[0] == size else left[1] + slope(left, right) * (size - left[0])
        )
    return found


def slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    """Seconds per node between two sizes."""
    return (right[1] - left[1]) / (right[0] - left[0])
