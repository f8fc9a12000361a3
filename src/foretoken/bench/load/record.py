"""What happened: one request and its answer, and one block of requests at one load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from foretoken.bench.load.arrivals import Level

TIMEOUT = "timeout"  # the kind of an error: no end in time
INTERRUPTED = "interrupted"  # nor before Ctrl-C
CENSORED = (TIMEOUT, INTERRUPTED)  # its times would have been longer than what was waited


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. Times are seconds since its block began."""

    number: int  # of the block: the same prompt, at the same scheduled time, on every server
    prompt: str
    family: str
    due: float  # when it was to be sent; latencies count from here
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)  # when pieces of text came
    ended: float = 0.0
    tokens: int = 0
    counted: bool = True  # pieces were counted as tokens: the server told no usage
    prompt_tokens: int | None = None
    finish: str | None = None
    error: str | None = None  # its kind
    detail: str | None = None
    streamed: bool = True

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def waited(self) -> bool:
        """Whether its times tell how long one waits: it was answered, or waited for in vain."""
        return self.ok or self.error in CENSORED

    @property
    def ttft(self) -> float | None:
        """Time to first token, from when the request was due; at least, where none came in time."""
        if not self.streamed or not (self.pieces or self.error in CENSORED):
            return None
        return self.pieces[0] - self.due if self.pieces else self.latency

    @property
    def latency(self) -> float:
        """End-to-end latency, from when the request was due."""
        return self.ended - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        if not self.streamed or not self.pieces or self.tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1)

    @property
    def late(self) -> float:
        """How long the load generator itself held the request back."""
        return self.sent - self.due

    def tokens_within(self, start: float, stop: float) -> float:
        """Output tokens that came in a span; every piece of text stands for equally many."""
        if not self.pieces:
            return 0.0
        inside = sum(start <= at < stop for at in self.pieces)
        return self.tokens * inside / len(self.pieces)

    def seconds_within(self, start: float, stop: float) -> float:
        """How much of a span the request was in flight."""
        return max(0.0, min(self.ended, stop) - max(self.sent, start))

    def cut_off(self, now: float) -> None:
        """End it at Ctrl-C: what was waited until then is known, and what came."""
        self.error, self.detail = INTERRUPTED, "cut off by Ctrl-C"
        self.sent, self.ended = self.sent or now, now  # it may have waited to be sent
        if self.counted and self.streamed:
            self.tokens = len(self.pieces)


@dataclass(slots=True, kw_only=True)
class Block:
    """Requests of one load to one server, without a break."""

    server: str
    level: Level
    round: int
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    last_sent: float = 0.0  # when the last request was due: afterwards the load falls
    planned: int | None = None  # requests of the schedule, where one was made beforehand
    length: float | None = None  # of a day, in seconds
    reached: float | None = None  # of a day with fewer requests than it has: its last arrival
    held: int = 0  # requests that waited at the limit of requests in flight
    unfinished: int = 0  # of the records: cut off by Ctrl-C
    cpu: float = 0.0  # seconds of processor time that the load generator took
    lags: list[float] = field(default_factory=list)  # how late its event loop woke up
    # model, processor and version of foretoken it was measured with; blocks of before tell none
    made: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.level.label} / {self.round} / {self.server}"

    @property
    def day_until(self) -> float:
        """Seconds of its day that came: until Ctrl-C or the last of its requests, or all of it."""
        assert self.length is not None  # of a day
        until = self.length if self.reached is None else self.reached
        cut = self.unfinished or len(self.records) < (self.planned or 0)
        return min(until, self.seconds) if cut else until

    def to_dict(self) -> dict[str, Any]:
        """Plain values, times to the tenth of a millisecond."""
        found = asdict(self)
        found["lags"] = rounded(self.lags)
        for one in found["records"]:
            one["pieces"] = rounded(one["pieces"])
        return found


def block_of(found: Mapping[str, Any]) -> Block:
    """A block from its plain values."""
    records = [Record(**one) for one in found["records"]]
    return Block(**{**found, "level": Level(**found["level"]), "records": records})


def rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
