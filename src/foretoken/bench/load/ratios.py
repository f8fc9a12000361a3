"""One server over another on the same requests, with intervals resampled in pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.bench.intervals import over_resamples, spread
from foretoken.bench.load.sample import FEWEST, Floats, Sample

RATIOS = (("ttft", 50), ("ttft", 95), ("tpot", 50), ("latency", 50), ("latency", 95))


def over(one: Sample, other: Sample) -> dict[str, Any]:
    """Throughput and latencies of `one` in times of `other`'s.

    Latencies: percentiles over the requests that both answered within their steady parts.
    Throughput: over the requests of either; a resample takes a request on both servers at once.
    """
    found = {"tokens_per_second": throughputs(one, other)}
    for name, q in RATIOS:
        if ratio := latencies(one, other, name, q):
            found[f"{name}_p{q}"] = ratio
    return found


def throughputs(one: Sample, other: Sample) -> dict[str, Any]:
    """Ratio of tokens per second."""
    keys = sorted({*one.keys, *other.keys})
    sides = [(side, laid(side, side.tokens, keys), laid(side, side.busy, keys))
             for side in (one, other)]  # fmt: skip
    points = [float(side.rate(tokens.sum(), busy.sum())) for side, tokens, busy in sides]
    if not points[1]:
        return {"value": None, "interval": None, "of": len(keys)}

    def again(at: npt.NDArray[np.int64]) -> Floats:
        return np.stack([side.rate(tokens[at].sum(axis=1), busy[at].sum(axis=1))
                         for side, tokens, busy in sides])  # fmt: skip

    above, below = over_resamples(again, len(keys))
    return {
        "value": points[0] / points[1],
        "interval": interval(above, below, len(keys)),
        "of": len(keys),
    }


def latencies(one: Sample, other: Sample, name: str, q: int) -> dict[str, Any] | None:
    """Ratio of a percentile of latency; None where no request has one on both servers."""
    keys = sorted({*one.keys} & {*other.keys})
    values = [laid(side, side.values[name], keys) for side in (one, other)]
    both = np.isfinite(values[0]) & np.isfinite(values[1])
    above, below = values[0][both], values[1][both]
    if not both.any() or not np.percentile(below, q):
        return None

    def again(at: npt.NDArray[np.int64]) -> Floats:
        return np.stack([np.percentile(side[at], q, axis=1) for side in (above, below)])

    drawn = over_resamples(again, len(above))
    return {
        "value": float(np.percentile(above, q) / np.percentile(below, q)),
        "interval": interval(drawn[0], drawn[1], len(above)),
        "of": len(above),
    }


def interval(above: Floats, below: Floats, count: int) -> tuple[float, float] | None:
    """The interval of a ratio of two statistics over the same resamples."""
    if count < FEWEST or not (below > 0).all():
        return None
    return spread(above / below)


def laid(sample: Sample, values: Floats, keys: list[tuple[int, int]]) -> Floats:
    """Values in the order of `keys`; 0 where a server was not asked."""
    known = dict(zip(sample.keys, values, strict=True))
    return np.array([known.get(key, 0.0) for key in keys])
