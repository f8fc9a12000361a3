"""What a load did to a server, in numbers: latencies, throughput, goodput, errors, the client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from foretoken.bench.load.hours import by_hour
from foretoken.bench.load.record import Block, Record
from foretoken.bench.load.sample import (
    LATENCIES,
    Promise,
    Sample,
    measured,
    percentiles,
    sample_of,
)

BUSY = 0.6  # share of a core from which the load generator may be what is measured
LATE = 0.02  # seconds that its event loop may wake up late


def summary(blocks: Sequence[Block], promise: Promise, floors: dict[str, float]) -> dict[str, Any]:
    """One load and one server, over all rounds."""
    records = [record for block in blocks for record in block.records]
    found: dict[str, Any] = {
        "requests": len(records),
        "answered": sum(record.ok for record in records),
        "errors": errors(records),
        "unfinished": sum(block.unfinished for block in blocks),
        "client": client(blocks),
    }
    sample = sample_of(blocks, promise, floors)
    if sample is None or not found["answered"]:
        return found
    families = sorted({record.family for record in records})
    found |= {
        "steady": cut(sample, blocks),
        "tokens_from": tokens_from(records),
        "tokens": float(np.mean([record.tokens for record in records if record.ok])),
        "throughput": throughput(sample),
        "goodput": goodput(sample) if promise.asked else None,
        **{name: percentiles(sample.values[name]) for name in LATENCIES},
        "families": {family: of_family(sample, family) for family in families},
    }
    if blocks[0].level.kind == "day":
        found["day"] = by_hour(blocks, promise)
    return found


def errors(records: Sequence[Record]) -> dict[str, Any]:
    """Failed requests by kind, the commonest first, with what was said the first time."""
    counts = Counter(record.error for record in records if record.error is not None)
    said = {record.error: record.detail for record in reversed(records)}
    return {
        str(kind): {"count": count, "example": said[kind]} for kind, count in counts.most_common()
    }


def client(blocks: Sequence[Block]) -> dict[str, Any]:
    """What the load generator itself took, and how punctual it was."""
    lags = [lag for block in blocks for lag in block.lags] or [0.0]
    late = [record.late for block in blocks for record in block.records] or [0.0]
    seconds = sum(block.seconds for block in blocks)
    return {
        "cpu_share": sum(block.cpu for block in blocks) / seconds if seconds else 0.0,
        "lag_p99": float(np.percentile(lags, 99)),
        "lag_max": max(lags),
        "late_p99": float(np.percentile(late, 99)),
        "held": sum(block.held for block in blocks),
        "seconds": seconds,
    }


def doubts(found: dict[str, Any]) -> list[str]:
    """Why the load generator may have been slower than the server."""
    told, own = [], found["client"]
    if own["cpu_share"] > BUSY:
        told.append(f"the load generator took {100 * own['cpu_share']:.0f} % of a core")
    if own["lag_p99"] > LATE:
        told.append(f"its event loop woke up {1000 * own['lag_p99']:.0f} ms late (99th percentile)")
    return told


def cut(sample: Sample, blocks: Sequence[Block]) -> dict[str, Any]:
    """How much was left out as warm-up and tail, and by which rule."""
    pairs = list(zip(blocks, sample.parts, strict=True))
    due = [(record.due, part) for block, part in pairs for record in block.records]
    return {
        "rules": list(dict.fromkeys(part.rule for part in sample.parts)),
        "seconds": sample.seconds,
        "requests": int(sample.sent.sum()),
        "warm_up_seconds": sum(part.start for part in sample.parts),
        "warm_up_requests": sum(at < part.start for at, part in due),
        "tail_seconds": sum(max(0.0, block.seconds - part.stop) for block, part in pairs),
        "tail_requests": sum(at > part.stop for at, part in due),
    }


def tokens_from(records: Sequence[Record]) -> str:
    """Who counted the tokens."""
    ways = {record.counted for record in records if record.ok}
    if len(ways) > 1:
        return "usage and pieces"
    return "pieces" if True in ways else "usage"


def throughput(sample: Sample) -> dict[str, Any]:
    """Output tokens per second of the steady part, requests per second, requests in flight."""
    tokens, busy, count = sample.tokens, sample.busy, len(sample.keys)
    return {
        "tokens_per_second": measured(
            float(sample.rate(tokens.sum(), busy.sum())),
            count,
            lambda at: sample.rate(tokens[at].sum(axis=1), busy[at].sum(axis=1)),
        ),
        "requests_per_second": float(sample.finished.sum()) / sample.seconds,
        "in_flight": sample.in_flight,
    }


def goodput(sample: Sample) -> dict[str, Any] | None:
    """Share of requests that kept the promise, and the tokens per second of these alone; None where
    no request that ended was sent within the steady part: of nothing there is no share.
    """
    good = sample.good[sample.sent & sample.told]
    if not len(good):
        return None
    tokens, busy = sample.tokens * sample.good, sample.busy
    return {
        "share": measured(good.mean(), len(good), lambda at: good[at].mean(axis=1)),
        "tokens_per_second": measured(
            float(sample.rate(tokens.sum(), busy.sum())),
            len(sample.keys),
            lambda at: sample.rate(tokens[at].sum(axis=1), busy[at].sum(axis=1)),
        ),
    }


def of_family(sample: Sample, family: str) -> dict[str, Any]:
    """The same for the prompts of one family; their part of the tokens of all."""
    mine = np.array([record.family == family for record in sample.records])
    sent = mine & sample.sent & sample.told
    return {
        "requests": int(mine.sum()),
        "answered": sum(record.ok for record in sample.records if record.family == family),
        "tokens_per_second": float(sample.tokens[mine].sum()) / sample.seconds,
        "good_share": float(sample.good[sent].mean()) if sent.any() else None,
        **{name: percentiles(sample.values[name][mine]) for name in LATENCIES},
    }
