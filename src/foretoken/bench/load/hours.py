"""A day hour by hour: what users met at four in the morning and in the evening."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foretoken.bench.load.arrivals import HOURS
from foretoken.bench.load.record import Block, Record
from foretoken.bench.load.sample import Promise, telling

PARTS = 12  # of a day


def by_hour(blocks: Sequence[Block], promise: Promise) -> list[dict[str, Any]]:
    """Every part of the day, over all rounds: arrivals, tokens, and how long was waited.

    A round that was cut short counts up to there: what nobody was asked is not what a server did
    not write. Rates are None where no round came so far.
    """
    found = []
    for part in range(PARTS):
        start, stop = part / PARTS, (part + 1) / PARTS
        inside, seconds, tokens = list[Record](), 0.0, 0.0
        for block in blocks:
            assert block.length is not None  # of a day
            first, last = start * block.length, stop * block.length
            until = min(last, block.day_until)
            seconds += max(0.0, until - first)
            inside += [record for record in block.records if first <= record.due < last]
            tokens += sum(r.tokens_within(first, until) for r in block.records if r.ok)
        found.append(
            {
                "hour": HOURS * start,
                "until": HOURS * stop,
                "requests": len(inside),
                "arrivals_per_second": len(inside) / seconds if seconds else None,
                "tokens_per_second": tokens / seconds if seconds else None,
                "good_share": mean([promise.kept(r) for r in inside if promise.told(r)]),
                **waits([record for record in inside if record.ttft is not None]),
            }
        )
    return found


def mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def waits(records: Sequence[Record]) -> dict[str, float | None]:
    """Median and 95th percentile of times to first token."""
    values = np.array([record.ttft for record in records], dtype=float)
    values = values[telling(records, values, first=True)]
    if not len(values):
        return {"ttft_p50": None, "ttft_p95": None}
    middle, high = np.percentile(values, [50, 95])
    return {"ttft_p50": float(middle), "ttft_p95": float(high)}
