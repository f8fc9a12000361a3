"""Medians and percentile bootstrap intervals over prompts.

Prompts (under load: requests) are the units of resampling, and every row is resampled with the same
prompts, so a ratio of two rows is a paired statistic (one resample asks: what if these had been the
prompts?).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from foretoken.coins import SeededCoins

RESAMPLES = 1000
HELD = 1 << 22  # indices of resamples held at once: 32 MB, and as much of what is read by them


@lru_cache(maxsize=8)
def resamples(count: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Index sets drawn with replacement from `count` prompts."""
    coins = SeededCoins(seed)
    law = torch.full((count,), 1.0 / count, dtype=torch.float64)
    return tuple(tuple(coins.draw(law) for _ in range(count)) for _ in range(RESAMPLES))


def interval(
    statistic: Callable[[Sequence[int]], float], count: int, level: float = 0.95
) -> tuple[float, float] | None:
    """Percentile interval of `statistic(indices)`; None with fewer than three prompts."""
    if count < 3:
        return None
    values = sorted(statistic(sample) for sample in resamples(count))
    tail = (1.0 - level) / 2.0
    return values[int(tail * RESAMPLES)], values[min(int((1.0 - tail) * RESAMPLES), RESAMPLES - 1)]


def median_interval(values: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Median of `values` with its interval."""
    span = interval(lambda at: median([values[i] for i in at]), len(values))
    return median(values), span


def ratio_interval(
    above: Sequence[float], below: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Ratio of medians of two paired samples with its interval."""

    def ratio(at: Sequence[int]) -> float:
        return median([above[i] for i in at]) / median([below[i] for i in at])

    return ratio(range(len(above))), interval(ratio, len(above))


@lru_cache(maxsize=4)
def resampled(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Index sets [RESAMPLES, count] as an array: for hundreds of requests instead of prompts."""
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def over_resamples(
    statistic: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]],
    count: int,
    seed: int = 0,
) -> npt.NDArray[np.float64]:
    """`statistic(index sets)` of all of `resampled`, whose last axis is the resamples.

    Those of very many requests are drawn and looked at some at a time: the same ones, as one
    generator draws them in the same order, in a memory that does not grow with the requests.
    """
    some = max(HELD // max(count, 1), 1)
    if some >= RESAMPLES:
        return statistic(resampled(count, seed))
    chance = np.random.default_rng(seed)
    sizes = [min(some, RESAMPLES - done) for done in range(0, RESAMPLES, some)]
    parts = [statistic(chance.integers(count, size=(size, count))) for size in sizes]
    return np.concatenate(parts, axis=-1)


def spread(values: npt.NDArray[np.float64], level: float = 0.95) -> tuple[float, float] | None:
    """Percentile interval of a statistic from its values over resamples; None if one has none."""
    if not np.isfinite(values).all():
        return None
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(values, [tail, 100.0 - tail])
    return float(low), float(high)
