"""Pictures of a load test: throughput and latencies against the load, and the course of a day.

A server has one colour in every picture; its percentiles are told apart by names at their ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from foretoken.bench import svg
from foretoken.bench.svg import WIDTH, Picture

Point = tuple[float, float]
Read = Callable[[Mapping[str, Any]], float | None]
COLOURS = ("look-up", "draft-model", "self-speculation", "peers", "lossy", "baseline")
AXES = {
    "closed": "clients at once",
    "poisson": "requests per second that arrive",
    "day": "requests per second in the busiest hour",
}
LEFT, RIGHT, TOP, BOTTOM = 44.0, WIDTH - 40.0, 32.0, 232.0
APART = 11.0  # between names at the ends of curves


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: whose it is, what it is called at its end, and its points."""

    server: str
    name: str
    points: Sequence[Point]


def draw(results: Mapping[str, Any]) -> dict[str, Picture]:
    """Every picture there are numbers for, by name."""
    loads: dict[str, tuple[str, str, Mapping[str, Read]]] = {
        "throughput": ("Throughput", "output tokens per second", {"": speed}),
        "ttft": ("Time to first token", "milliseconds", quantiles("ttft")),
        "tpot": ("Time per output token after the first", "milliseconds", quantiles("tpot")),
        "latency": ("End-to-end latency", "milliseconds", quantiles("latency")),
        "goodput": ("Goodput", "% of requests answered within the targets", {"": good}),
    }
    days = {
        "day": ("A day: output tokens per second", "tokens_per_second", 1.0),
        "day-ttft": ("A day: 95th percentile of TTFT in milliseconds", "ttft_p95", 1000.0),
    }
    made = {name: against_load(results, *asked) for name, asked in loads.items()}
    made |= {name: over_day(results, *asked) for name, asked in days.items()}
    return {name: picture for name, picture in made.items() if picture is not None}


def speed(row: Mapping[str, Any]) -> float | None:
    return row["throughput"]["tokens_per_second"]["value"] if "throughput" in row else None


def good(row: Mapping[str, Any]) -> float | None:
    return 100 * row["goodput"]["share"]["value"] if row.get("goodput") else None


def quantiles(name: str) -> dict[str, Read]:
    """Median and tails of a latency, in milliseconds."""

    def at(q: str) -> Read:
        return lambda row: 1000 * row[name][q]["value"] if row.get(name) else None

    return {q: at(q) for q in ("p50", "p95", "p99")}


def against_load(
    results: Mapping[str, Any], title: str, unit: str, of: Mapping[str, Read]
) -> Picture | None:
    """Curves over loads that double, one for each server and statistic; None for a single load."""
    levels = sorted(results["levels"], key=lambda level: level["value"])
    if len(levels) < 2:
        return None
    lines = []
    for server in results["servers"]:
        for name, read in of.items():
            rows = [(level["value"], level["servers"].get(server)) for level in levels]
            points = [(x, y) for x, row in rows if row and (y := read(row)) is not None]
            lines += [Line(server, name, points)] if points else []
    if not lines:
        return None
    values = [level["value"] for level in levels]
    first, last = math.log2(values[0]), math.log2(values[-1])

    def across(x: float) -> float:
        return (math.log2(x) - first) / (last - first)

    note = f"{AXES[levels[0]['kind']]}; {unit}"
    return curves(title, lines, across, {x: f"{x:g}" for x in values}, note)


def over_day(results: Mapping[str, Any], title: str, name: str, scale: float) -> Picture | None:
    """A value hour by hour, of the busiest day that was tried; a gap where there is none."""
    days = [level for level in results["levels"] if level["kind"] == "day"]
    if not days:
        return None
    lines = []
    for server, row in max(days, key=lambda level: level["value"])["servers"].items():
        hours = [((one["hour"] + one["until"]) / 2, one[name]) for one in row.get("day", [])]
        for known, span in groupby(hours, lambda hour: hour[1] is not None):
            if known:
                lines.append(Line(server, "", [(hour, scale * value) for hour, value in span]))
    ticks = {float(hour): f"{hour}" for hour in range(0, 25, 4)}
    note = "hour of the compressed day"
    return curves(title, lines, lambda hour: hour / 24.0, ticks, note) if lines else None


def curves(
    title: str,
    lines: Sequence[Line],
    across: Callable[[float], float],
    ticks: Mapping[float, str],
    note: str,
) -> Picture | None:
    """Lines from 0 up; `across` says where between left and right a value lies."""
    highest = max(y for line in lines for _, y in line.points)
    if highest <= 0:
        return None
    high = 1.08 * highest

    def at(x: float, y: float) -> Point:
        return LEFT + (RIGHT - LEFT) * across(x), BOTTOM - (BOTTOM - TOP) * y / high

    marks, taken = [], 0.0
    for tick in svg.steps_between(0.0, high):
        y = at(next(iter(ticks)), tick)[1]
        marks += [
            svg.line(LEFT - 6, y, RIGHT, y),
            svg.text(LEFT - 10, y + 4, f"{tick:g}", "small", "end"),
        ]
    for x, said in ticks.items():
        place = at(x, 0.0)[0]
        if place >= taken:  # a load close to another one's goes without its name
            marks.append(svg.text(place, BOTTOM + 16, said, "small", "middle"))
            taken = place + 24
    servers = list(dict.fromkeys(line.server for line in lines))
    kinds = {server: COLOURS[n % len(COLOURS)] for n, server in enumerate(servers)}
    for line in lines:
        marks.append(svg.curve([at(x, y) for x, y in line.points], kinds[line.server]))
    marks += names_at_ends([(line.name, at(*line.points[-1])) for line in lines if line.name])
    legend, y = svg.legend(BOTTOM + 38, [(kinds[server], server) for server in servers])
    told, y = svg.notes(y, note)
    return Picture(title, y + 8, (*marks, *legend, *told))


def names_at_ends(ends: Sequence[tuple[str, Point]]) -> list[str]:
    """Names of curves beside their last points, from the bottom up, none upon another."""
    marks, free = [], BOTTOM
    for name, (x, y) in sorted(ends, key=lambda end: -end[1][1]):
        place = min(y + 4, free)
        marks.append(svg.text(x + 8, place, name, "value"))
        free = place - APART
    return marks
