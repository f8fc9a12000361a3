"""What Prometheus reads: counts that each step adds to, and what clients waited for.

A step only adds to plain numbers, as it is made by one thread; they become metrics when these are
asked for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from foretoken.engine.record import Stats
from foretoken.engine.session import Session
from foretoken.lm.views.view import innermost
from foretoken.serve.estimate import PlainSteps
from foretoken.types import Step

if TYPE_CHECKING:
    from foretoken.training.online.draft import OnlineDraft
    from foretoken.training.online.serving import IdleLearning

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WAITED = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PACES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
LENGTHS = tuple(float(length) for length in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32))
WINDOW = 10.0  # seconds over which goodput is a mean


class Buckets:
    """A histogram of plain numbers, for one writer."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has it: how many lay at or below each bound."""
        counts = list(self.counts)
        names = [*map(str, self.bounds), "+Inf"]
        return [(name, float(sum(counts[: i + 1]))) for i, name in enumerate(names)]


class Rate:
    """Events per second, of late."""

    def __init__(self) -> None:
        self.value, self.at = 0.0, perf_counter()

    def add(self, count: float) -> None:
        now = perf_counter()
        self.value = self.value * math.exp((self.at - now) / WINDOW) + count / WINDOW
        self.at = now

    def now(self) -> float:
        return self.value * math.exp((self.at - perf_counter()) / WINDOW)


class Counts:
    """What the engine did for a server."""

    def __init__(self, plain: PlainSteps) -> None:
        self.plain = plain
        self.steps = self.emitted = self.drafted = self.accepted = 0
        self.drafter_errors = self.engine_errors = self.log_errors = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.goodput = Rate()
        self.lengths = Buckets(LENGTHS)
        self.phases = {name: Buckets(SECONDS) for name in ("prefill", "draft", "target", "other")}
        self.drafted_at: Counter[int] = Counter()  # by depth
        self.accepted_at: Counter[int] = Counter()

    def step(self, step: Step) -> None:
        """Count one step of the engine."""
        times, tokens = step.times, 0
        for draft, emitted in zip(step.drafts, step.emitted, strict=True):
            self.lengths.add(len(emitted))
            tokens += len(emitted)
            self.drafted += len(draft.tree) - 1
        self.steps += 1
        self.emitted += tokens
        for name, phase in self.phases.items():
            phase.add(getattr(times, name))
        self.goodput.add(tokens)
        self.plain.step(step)

    def text(self, stats: Stats) -> None:
        """Count a text that is over."""
        self.accepted += stats.accepted
        # Copied at once: where another thread makes the step that a text was cancelled in, it may
        # add a depth yet.
        self.drafted_at.update(dict(stats.drafted_at_depth))
        self.accepted_at.update(dict(stats.accepted_at_depth))


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(
        self, session: Session, counts: Counts, learning: IdleLearning | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self.requests = PrometheusCounter(
            "foretoken_requests", "Requests by path and status.", ["path", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.errors = PrometheusCounter(
            "foretoken_request_errors", "Requests by path and error, streams that had begun too.",
            ["path", "code"], registry=self.registry,
        )  # fmt: skip
        self.ttft = Histogram(
            "foretoken_time_to_first_token_seconds", "From a request to its first token.",
            buckets=WAITED, registry=self.registry,
        )  # fmt: skip
        self.tpot = Histogram(
            "foretoken_time_per_output_token_seconds", "Per token behind a text's first step.",
            buckets=PACES, registry=self.registry,
        )  # fmt: skip
        self.registry.register(EngineCollector(session, counts))
        if learning is not None:
            self.registry.register(LearningCollector(learning.online))


class EngineCollector(Collector):
    """Turns the counts of an engine into metrics."""

    def __init__(self, session: Session, counts: Counts) -> None:
        self.session, self.counts = session, counts

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._gauges()
        yield from self._histograms()
        yield from self._depths()
        yield from self._caches()

    def _counters(self) -> Iterator[Metric]:
        counts = self.counts
        told = {
            "steps": (counts.steps, "Steps of the engine."),
            "prompt_tokens": (counts.prompt_tokens, "Tokens of prompts."),
            "prompt_tokens_reused": (
                counts.cached_tokens,
                "Of these, tokens that an earlier text had left in the target's cache.",
            ),
            "generated_tokens": (counts.emitted, "Tokens written."),
            "drafted_tokens": (counts.drafted, "Tokens guessed."),
            "accepted_tokens": (counts.accepted, "Guesses that stand, of texts that are over."),
            "drafter_errors": (counts.drafter_errors, "Texts that went on by plain decoding."),
            "engine_errors": (counts.engine_errors, "Requests or steps that failed inside."),
            "log_errors": (counts.log_errors, "Lines that the request log did not take."),
        }
        for name, (value, words) in told.items():
            yield CounterMetricFamily(f"foretoken_{name}", words, value=value)

    def _gauges(self) -> Iterator[Metric]:
        engine = self.session.engine
        told: dict[str, tuple[float, str]] = {
            "queue_length": (len(engine.waiting), "Texts that wait for a place in the batch."),
            "running_rows": (len(engine.inside), "Texts in the batch."),
            "max_rows": (engine.max_rows, "Most texts in the batch."),
            "goodput_tokens_per_second": (
                self.counts.goodput.now(),
                "Tokens written per second, mean of late.",
            ),
        }
        for name, (value, words) in told.items():
            yield GaugeMetricFamily(f"foretoken_{name}", words, value=value)

    def _histograms(self) -> Iterator[Metric]:
        lengths = self.counts.lengths
        yield HistogramMetricFamily(
            "foretoken_accepted_length", "Tokens that a text gained in a step, the last its own.",
            buckets=lengths.cumulative(), sum_value=lengths.total,
        )  # fmt: skip
        phases = HistogramMetricFamily(
            "foretoken_step_seconds", "Seconds of a step by phase.", labels=["phase"]
        )
        for name, phase in self.counts.phases.items():
            phases.add_metric([name], phase.cumulative(), phase.total)
        yield phases

    def _depths(self) -> Iterator[Metric]:
        for name, found, words in (
            ("drafted_at_depth", self.counts.drafted_at, "Drafts that reached a depth."),
            ("accepted_at_depth", self.counts.accepted_at, "Of these, accepted so far."),
        ):
            family = CounterMetricFamily(f"foretoken_{name}", words, labels=["depth"])
            for depth, count in sorted(found.copy().items()):
                family.add_metric([str(depth)], count)
            yield family

    def _caches(self) -> Iterator[Metric]:
        """Memory for keys and values, of each model that has such a cache."""
        families = {
            name: GaugeMetricFamily(f"foretoken_{name}", words, labels=["model"])
            for name, words in (
                ("cache_slots", "Rows that the key-value cache has room for."),
                ("cache_rows", "Texts of which it holds keys and values."),
                ("cache_columns", "Tokens that each of its rows has room for."),
                ("cache_bytes", "Bytes of its buffers."),
                ("prefix_bytes", "Bytes kept of texts that are over."),
            )
        }
        for model, lm in zip(("target", "draft"), self.session.models, strict=False):
            for name, value in cache_of(lm).items():
                families[name].add_metric([model], value)
        yield from families.values()


class LearningCollector(Collector):
    """What a draft has learned while it served."""

    def __init__(self, online: OnlineDraft) -> None:
        self.online = online

    def collect(self) -> Iterator[Metric]:
        online = self.online
        for name, value, words in (
            ("requests", online.requests, "Texts that the draft heard the end of."),
            ("steps", online.steps, "Optimizer steps of the draft."),
            ("seconds", online.seconds, "Seconds that it spent learning."),
        ):
            yield CounterMetricFamily(f"foretoken_learning_{name}", words, value=value)
        for name, value, words in (
            ("acceptance", online.acceptance, "Accepted share of judged guesses, of late."),
            ("served_steps", online.served_steps, "Optimizer steps behind what guesses."),
            ("ended", float(online.failure is not None), "1 once an error has ended it."),
        ):
            yield GaugeMetricFamily(f"foretoken_learning_{name}", words, value=value)


def cache_of(lm: Any) -> dict[str, float]:
    """What a model's cache holds, whatever view it is seen through; nothing without buffers."""
    base = innermost(lm)
    cache, prefixes = getattr(base, "cache", None), getattr(base, "prefixes", None)
    found: dict[str, float] = {}
    if cache is not None and hasattr(cache, "groups"):
        held = [part.nbytes for group in cache.groups for part in (group.keys, group.values)]
        found = {"cache_slots": cache.slots, "cache_columns": cache.columns}
        found |= {"cache_bytes": sum(held), "cache_rows": lm.rows_held}
    if prefixes is not None:
        found["prefix_bytes"] = prefixes.held
    return found
