"""What steps cost by rows, tokens and cached tokens: a linear model that every step corrects.

SmartSpec (arXiv 2406.14066) predicts a forward by T = c0 + c_rows B + c_tokens N + c_kv K and a
draft likewise. Two things are added. One token alone is multiplied by other kernels than several
(`c_spec` of the paper's code). And a token costs more beyond 8, 16 and 32 of them, since a forward
reads the weights first and arithmetic counts later. No coefficient is negative, so that costs rise
and never get flatter, and a measurement that a pause made long cannot bend them downwards.

Few tokens are multiplied by kernels of blocks: four may take less than three. So what steps of so
many rows and tokens took is kept beside the line, up to `FEW` tokens. It fades as well: a size that
a pause made look slow is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from foretoken.controllers.lengths import FEW
from foretoken.controllers.step_costs import DRIFT, SURPRISE, rising
from foretoken.types import CostTable

Array = npt.NDArray[np.float64]
Features = tuple[float, ...]

KNOTS = (8, 16, 32)  # tokens beyond which one more may cost more
ROWS, TOKENS, CACHED = 32.0, 32.0, 8192.0  # units, so that coefficients are of one size
LEVELS = 8.0
TRUST = 0.2  # share by which a step may miss its prediction and count in full
FADE = 0.5 ** (1 / 64)  # of what steps said, per step
RIDGE = 1e-6  # of what is known best: coefficients that nothing tells apart stay small
REFIT = 16  # steps between solutions
FORGET = 0.5 ** (1 / 256)  # of what a number of tokens took, per step: it is of kernels
TRIED = 8.0  # steps of a size until its misses count by half


class Fit:
    """Seconds as a sum of features by coefficients, fitted by least squares of relative errors.

    What was profiled stays for good; what steps said fades. All of it is divided by a drift that
    follows clocks and neighbours at once.
    """

    __slots__ = ("coefficients", "drift", "profiled", "recent", "waiting")

    def __init__(self, size: int) -> None:
        self.profiled, self.recent = np.zeros((size, size + 1)), np.zeros((size, size + 1))
        self.coefficients: list[float] = [0.0] * size
        self.drift = 1.0
        # steps that are not in the coefficients yet: features, seconds, and their weight
        self.waiting: list[tuple[Features, float, float]] = []

    def seconds(self, features: Features) -> float:
        """The prediction."""
        pairs = zip(self.coefficients, features, strict=True)
        return self.drift * sum([share * feature for share, feature in pairs])

    def profile(self, points: Mapping[Features, float]) -> None:
        """Take in what was measured on purpose."""
        for features, seconds in points.items():
            self.profiled += equation(features, seconds / self.drift)
        self.solve()

    def seen(self, features: Features, seconds: float) -> bool:
        """Take in a step, the less the further it is from what was expected; True: refitted."""
        ratio, weight = surprise(seconds, self.seconds(features))
        self.waiting.append((features, max(seconds, 1e-9) / self.drift, weight))
        self.drift *= ratio**DRIFT
        if len(self.waiting) < REFIT:
            return False
        self.solve()
        return True

    def solve(self) -> None:
        """The coefficients of least squared errors; those that come out negative are left out."""
        for features, seconds, weight in self.waiting:
            self.recent = FADE * self.recent + weight * equation(features, seconds)
        self.waiting.clear()
        known = self.profiled + self.recent
        squares, right = known[:, :-1], known[:, -1]
        squares = squares + RIDGE * float(squares.diagonal().max()) * np.eye(len(squares))
        kept = list(range(len(squares)))
        while True:
            found = np.linalg.solve(squares[np.ix_(kept, kept)], right[kept])
            worst = int(found.argmin())
            if found[worst] >= 0.0 or len(kept) == 1:
                break
            del kept[worst]
        self.coefficients = [0.0] * len(squares)
        for place, value in zip(kept, found.tolist(), strict=True):
            self.coefficients[place] = max(value, 0.0)


def surprise(seconds: float, expected: float) -> tuple[float, float]:
    """How many times its prediction a step took, within bounds, and how much that counts."""
    ratio = min(max(seconds / max(expected, 1e-9), 1.0 / SURPRISE), SURPRISE)
    return ratio, min(1.0, TRUST / max(abs(ratio - 1.0), 1e-9))


class Size:
    """How many times their prediction steps of one number of tokens took; it fades by step."""

    __slots__ = ("at", "mean", "weight")

    def __init__(self) -> None:
        self.mean, self.weight, self.at = 1.0, 0.0, 0

    def seen(self, ratio: float, weight: float, step: int) -> None:
        self.weight = self.weight * FORGET ** (step - self.at) + weight
        self.mean += weight / self.weight * (ratio - self.mean)
        self.at = step

    def ratio(self, step: int) -> float:
        """What the prediction is to be multiplied by: little after few steps, or none of late."""
        weight = self.weight * FORGET ** (step - self.at)
        return 1.0 + (self.mean - 1.0) * weight / (weight + TRIED)


def equation(features: Features, seconds: float) -> Array:
    """One line of the normal equations, of the error as a share of the seconds."""
    line = np.array((*features, seconds)) / seconds
    return np.outer(line[:-1], line)


class Latency:
    """Seconds of target forwards and of drafts, for batches of any size."""

    MOST = 64  # tokens that are looked up at first

    def __init__(self) -> None:
        self.target, self.draft = Fit(4 + len(KNOTS) + 1), Fit(4)
        self.pieces: list[float] = []  # of the coefficients: what so many tokens add, by tokens
        self.near: dict[tuple[int, int], Size] = {}  # by rows and tokens
        self.steps = 0

    def learn(self, costs: CostTable) -> None:
        """Take in what a batch was measured to cost."""
        rows, cached = costs.rows, costs.cached
        self.near = {key: size for key, size in self.near.items() if key[0] != rows}
        self.target.profile(
            {
                scored(rows, nodes, cached): seconds + costs.overhead
                for nodes, seconds in rising(costs.target).items()
            }
        )
        if costs.draft:
            self.draft.profile(
                {
                    drafted(rows, depth, rows * depth): max(seconds, 1e-9)
                    for depth, seconds in rising(costs.draft).items()
                }
            )
        self.pieces = []

    def seen(self, rows: int, nodes: int, cached: int, seconds: float) -> None:
        """A target forward of a step, with all that was done outside both models."""
        features = scored(rows, nodes, cached)
        self.steps += 1
        if nodes <= FEW:
            size = self.near.setdefault((rows, nodes), Size())
            size.seen(*surprise(seconds, self.target.seconds(features)), self.steps)
        if self.target.seen(features, seconds):
            self.pieces = []

    def seen_draft(self, asked: int, depth: int, nodes: int, seconds: float) -> None:
        """A draft of a step: rows that were asked, its deepest level, and its nodes."""
        self.draft.seen(drafted(asked, depth, nodes), seconds)

    def scoring(self, rows: int, cached: int, most: int) -> list[float]:
        """Seconds of a forward by the nodes that are drafted in all, from none to `most`."""
        if len(self.pieces) <= rows + most:
            several, *slopes = self.target.coefficients[1:-2]
            nodes = np.arange(max(self.MOST, 2 * (rows + most)) + 1.0)
            pieces = several * (nodes > 1.0)
            for knot, slope in zip((0, *KNOTS), slopes, strict=True):
                pieces += slope / TOKENS * np.maximum(nodes - knot, 0.0)
            self.pieces = pieces.tolist()
        fit = self.target
        base = fit.coefficients[0] + fit.coefficients[-2] * rows / ROWS
        base += fit.coefficients[-1] * cached / CACHED
        drift = fit.drift
        found = [drift * (base + piece) for piece in self.pieces[rows : rows + most + 1]]
        for tokens in range(rows, min(FEW, rows + most) + 1):
            if size := self.near.get((rows, tokens)):
                found[tokens - rows] *= size.ratio(self.steps)
        return found

    def drafting(self, depth: int) -> tuple[list[float], float, float]:
        """Seconds of a draft by its deepest level, from none to `depth`; more per row that is
        asked, and per node.
        """
        units = (1.0, ROWS, LEVELS, TOKENS)
        start, row, level, node = (
            self.draft.drift * share / unit
            for share, unit in zip(self.draft.coefficients, units, strict=True)
        )
        return [0.0, *[start + level * at for at in range(1, depth + 1)]], row, node


def tokens_of(nodes: int) -> Features:
    """What the number of tokens in a forward says of its cost."""
    beyond = [max(nodes - knot, 0) / TOKENS for knot in KNOTS]
    return float(nodes > 1), nodes / TOKENS, *beyond


def scored(rows: int, nodes: int, cached: int) -> Features:
    """What tells the cost of a target forward."""
    return 1.0, *tokens_of(nodes), rows / ROWS, cached / CACHED


def drafted(asked: int, depth: int, nodes: int) -> Features:
    """What tells the cost of a draft."""
    return 1.0, asked / ROWS, depth / LEVELS, nodes / TOKENS
