"""What a process holds while it runs for hours, sampled from outside; whether that grows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from scipy.stats import theilslopes

from foretoken.bench.load.plots import Line, curves
from foretoken.bench.svg import Picture

MIB = 1 << 20
WARM_UP = 0.1  # of the time: caches fill, threads begin
FIGURES = (  # of /metrics, summed over labels
    "queue_length", "running_rows", "cache_rows", "cache_bytes", "prefix_bytes", "steps_total",
    "generated_tokens_total", "drafted_tokens_total", "accepted_tokens_total",
    "prompt_tokens_total", "prompt_tokens_reused_total", "drafter_errors_total",
    "engine_errors_total", "log_errors_total", "requests_total",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """A process at one time."""

    seconds: float  # since the watch began
    rss: int
    handles: int  # all that are open
    files: int  # of these, all but connections
    threads: int
    cpu: float  # seconds of the processor, all in all
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Growth:
    """How fast a value rises per hour: the median of slopes, and the interval of that."""

    value: float
    low: float
    high: float

    def told(self, unit: str) -> str:
        return f"{self.low:.2f} to {self.high:.2f}{unit}"


@dataclass
class Watch:
    """Samples of one server, at most one of each moment."""

    pid: int
    http: httpx.Client
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process, self.began = psutil.Process(self.pid), monotonic()

    def take(self) -> Sample:
        """Look at the process and at its figures, now."""
        figures = figures_of(self.http.get("/metrics").text)
        with self.process.oneshot():
            found = Sample(
                monotonic() - self.began,
                self.process.memory_info().rss,
                self.process.num_fds(),
                files_of(self.pid),
                self.process.num_threads(),
                self.cpu(),
                figures,
            )
        self.samples.append(found)
        return found

    def cpu(self) -> float:
        """Seconds of the processor so far."""
        times = self.process.cpu_times()
        return times.user + times.system

    def warm(self) -> list[Sample]:
        """The samples behind the warm-up."""
        if not self.samples:
            return []
        begins = WARM_UP * self.samples[-1].seconds
        return [one for one in self.samples if one.seconds >= begins]

    def growth(self, name: str, scale: float = 1.0) -> Growth | None:
        """Of a value behind the warm-up, per hour; None of fewer than four samples.

        The slope is Theil and Sen's, which single peaks do not move. Its interval takes samples as
        independent, which a heap's are not: it says how well the line lies, no more.
        """
        found = [(one.seconds / 3600.0, scale * value_of(one, name)) for one in self.warm()]
        if len(found) < 4:
            return None
        hours, values = zip(*found, strict=True)
        slope = theilslopes(values, hours, 0.95)
        return Growth(float(slope.slope), float(slope.low_slope), float(slope.high_slope))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"samples": [asdict(one) for one in self.samples]}


def files_of(pid: int) -> int:
    """Open handles that are no sockets: those come and go with clients."""
    found = 0
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            found += not os.readlink(one).startswith("socket:")
    return found


def value_of(sample: Sample, name: str) -> float:
    """A value of the process, or a figure that it tells."""
    return float(getattr(sample, name) if name in Sample.__slots__ else sample.figures[name])


def figures_of(text: str) -> dict[str, float]:
    """The figures of a server that are kept, as Prometheus reads them."""
    found = dict.fromkeys(FIGURES, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("foretoken_")
            if name in found:
                found[name] += sample.value
    return found


def middle(samples: Sequence[Sample], name: str) -> float:
    return median(value_of(one, name) for one in samples)


def picture(samples: Sequence[Sample], most: int = 60) -> Picture | None:
    """Memory over time, and the caches' part of it; points are medians where there are many."""
    if len(samples) < 2:
        return None
    size = -(-len(samples) // most)
    parts = [samples[at : at + size] for at in range(0, len(samples), size)]
    minutes = [middle(part, "seconds") / 60.0 for part in parts]
    named = {
        "resident": [middle(part, "rss") / MIB for part in parts],
        "caches": [(middle(part, "cache_bytes") + middle(part, "prefix_bytes")) / MIB
                   for part in parts],
    }  # fmt: skip
    lines = [
        Line(name, "", list(zip(minutes, values, strict=True))) for name, values in named.items()
    ]
    last = minutes[-1] or 1.0
    return curves(
        "Memory of the server", lines, lambda minute: minute / last, ticks(last),
        "MiB; minutes of mixed load",
    )  # fmt: skip


def ticks(last: float) -> dict[float, str]:
    """Six round times from 0 to the last."""
    unit = next((size for size in (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60) if last / size <= 7), 120)
    return {n * unit: f"{n * unit:g}" for n in range(int(last / unit) + 1)}
