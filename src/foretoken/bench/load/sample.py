"""Requests of one load and one server as arrays, so that statistics can be resampled at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.bench.intervals import over_resamples, spread
from foretoken.bench.load.record import INTERRUPTED, Block, Record
from foretoken.bench.load.steady import Steady, steady_part

Floats = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "latency", "queue")
FEWEST = 3  # values below which there is no interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a request must keep to be good, in seconds; None: anything."""

    ttft: float | None = None
    tpot: float | None = None

    @property
    def asked(self) -> bool:
        return self.ttft is not None or self.tpot is not None

    def kept(self, record: Record) -> bool:
        """Whether a request was answered, and fast enough. A text of one token has no pace."""
        if not record.ok:
            return False
        slow = self.ttft is not None and (record.ttft is None or record.ttft > self.ttft)
        return not slow and (self.tpot is None or (record.tpot or 0.0) <= self.tpot)

    def told(self, record: Record) -> bool:
        """Whether it is known that a request kept it, or did not. One that Ctrl-C cut off might
        have, but for a first token that was late by then."""
        late = self.ttft is not None and (record.ttft is None or record.ttft > self.ttft)
        return late or record.error != INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All requests of one load to one server, over all rounds."""

    records: Sequence[Record]
    keys: Sequence[tuple[int, int]]  # round and number: the same request on every server
    parts: Sequence[Steady]  # of every block
    open: bool
    sent: npt.NDArray[np.bool_]  # within the steady part
    tokens: Floats  # of answered requests, that came within it
    busy: Floats  # seconds in flight within it
    finished: Floats  # 1 where it was answered to the end within it
    good: Floats  # 1 where the promise was kept
    told: npt.NDArray[np.bool_]  # where it is known whether it was
    values: Mapping[str, Floats]  # latencies; nan where there is none, or none that counts

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def in_flight(self) -> float:
        """Requests in flight on average."""
        return float(self.busy.sum()) / self.seconds if self.seconds else 0.0

    def rate(self, tokens: Floats, busy: Floats) -> Floats:
        """Tokens per second from sums over requests, which may be resampled.

        What the load holds fixed stays fixed: in a closed loop the number in flight (by Little's
        law tokens per second are that, times tokens per second in flight), in an open one arrivals.
        """
        if self.open:
            return tokens / self.seconds
        return self.in_flight * np.divide(tokens, busy, out=np.zeros_like(tokens), where=busy > 0)


def sample_of(
    blocks: Sequence[Block], promise: Promise, floors: Mapping[str, float]
) -> Sample | None:
    """The sample of all rounds of a load; None if no request ended.

    `floors` are the least times to first token that this server showed, by family.
    """
    parts = [steady_part(block) for block in blocks]
    rows = [
        (block, part, record)
        for block, part in zip(blocks, parts, strict=True)
        for record in block.records
    ]
    if not rows:
        return None
    sent = np.array([part.holds(record) for _, part, record in rows])

    records = [record for _, _, record in rows]

    def column(of: Callable[[Record, Steady], float | None]) -> Floats:
        found = [of(record, part) for _, part, record in rows]
        return np.array([np.nan if value is None else value for value in found], dtype=float)

    def waits(of: Callable[[Record, Steady], float | None], first: bool = False) -> Floats:
        values = column(of)
        return np.where(sent & telling(records, values, first), values, np.nan)

    def tokens(record: Record, part: Steady) -> float:
        return part.tokens(record) if record.ok else 0.0

    def finished(record: Record, part: Steady) -> float:
        return float(record.ok and part.ends(record))

    def queue(record: Record, part: Steady) -> float | None:
        return None if record.ttft is None else record.ttft - floors.get(record.family, 0.0)

    return Sample(
        records=records,
        keys=[(block.round, record.number) for block, _, record in rows],
        parts=parts,
        open=blocks[0].level.open,
        sent=sent,
        tokens=column(tokens),
        busy=column(lambda record, part: record.seconds_within(part.start, part.stop)),
        finished=column(finished),
        good=column(lambda record, part: float(promise.kept(record))),
        told=np.array([promise.told(record) for _, _, record in rows]),
        values={
            "ttft": waits(lambda record, part: record.ttft, first=True),
            "tpot": waits(lambda record, part: record.tpot if record.ok else None),
            "latency": waits(lambda record, part: record.latency),
            "queue": waits(queue, first=True),
        },
    )


def telling(records: Sequence[Record], values: Floats, first: bool) -> npt.NDArray[np.bool_]:
    """Which waits tell how long one waits. Of a request that Ctrl-C cut off only one that was
    longer than all others does: its end may have been a moment away. With `first` they are waits
    for first tokens, which may have come before.
    """
    cut = np.array([r.error == INTERRUPTED and not (first and r.pieces) for r in records], bool)
    waited = np.array([record.waited for record in records], bool)
    whole = values[waited & ~cut & np.isfinite(values)]
    longest = whole.max() if len(whole) else -np.inf
    known: npt.NDArray[np.bool_] = waited & ~(cut & (values <= longest))
    return known


def floors_of(blocks: Sequence[Block]) -> dict[str, float]:
    """The least time from sending to the first token, by family, over all loads of a server."""
    found: dict[str, float] = {}
    for block in blocks:
        for record in block.records:
            if record.ok and record.ttft is not None:
                taken = record.ttft - record.late
                found[record.family] = min(taken, found.get(record.family, taken))
    return found


def percentiles(values: Floats) -> dict[str, Any] | None:
    """Percentiles and mean with bootstrap intervals; None where there are no values."""
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    names = [f"p{q}" for q in PERCENTILES]
    points = [*np.percentile(known, PERCENTILES), known.mean()]
    spans: list[Any] = [None] * len(points)
    if len(known) >= FEWEST:

        def again(at: npt.NDArray[np.int64]) -> Floats:
            drawn = known[at]
            return np.stack([*np.percentile(drawn, PERCENTILES, axis=1), drawn.mean(axis=1)])

        spans = [spread(one) for one in over_resamples(again, len(known))]
    return {
        name: {"value": float(point), "interval": span}
        for name, point, span in zip([*names, "mean"], points, spans, strict=True)
    } | {"of": len(known)}


def measured(point: float, count: int, again: Callable[[npt.NDArray[np.int64]], Floats]) -> Any:
    """A number with the interval of its resamples."""
    span = spread(over_resamples(again, count)) if count >= FEWEST else None
    return {"value": float(point), "interval": span}
