"""Pictures of a load test: throughput and latencies against the load, and the course of a day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.bench import svg
from foretoken.bench.plots import curves
from foretoken.bench.svg import WIDTH, Picture

Point = tuple[float, float]
AXES = {
    "closed": "clients at once",
    "poisson": "requests per second that arrive",
    "day": "requests per second in the busiest hour",
}
COLOURS = ("look-up", "draft-model", "self-speculation", "peers", "lossy", "baseline")


def draw(results: Mapping[str, Any]) -> dict[str, Picture]:
    """Every picture there are numbers for, by name."""
    made = {
        "throughput": against_load(
            results, "Throughput", {"": lambda row: speed(row)}, "output tokens per second"
        ),
        "ttft": against_load(results, "Time to first token", quantiles("ttft"), "milliseconds"),
        "tpot": against_load(
            results, "Time per output token", quantiles("tpot"), "milliseconds, after the first"
        ),
        "latency": against_load(
            results, "End-to-end latency", quantiles("latency"), "milliseconds"
        ),
        "goodput": against_load(
            results, "Goodput", {"": good}, "% of requests answered within the targets"
        ),
        "day": over_day(results, "tokens_per_second", "A day: output tokens per second", 1.0),
        "day-ttft": over_day(
            results, "ttft_p95", "A day: time to first token, 95th percentile, milliseconds", 1000.0
        ),
    }
    return {name: picture for name, picture in made.items() if picture is not None}


def speed(row: Mapping[str, Any]) -> float | None:
    return row["throughput"]["tokens_per_second"]["value"] if "throughput" in row else None


def good(row: Mapping[str, Any]) -> float | None:
    return 100 * row["goodput"]["share"]["value"] if row.get("goodput") else None


def quantiles(name: str) -> dict[str, Any]:
    """Median and tail of a latency, in milliseconds."""

    def at(q: str) -> Any:
        return lambda row: 1000 * row[name][q]["value"] if row.get(name) else None

    return {q: at(q) for q in ("p50", "p95", "p99")}


def against_load(
    results: Mapping[str, Any], title: str, of: Mapping[str, Any], unit: str
) -> Picture | None:
    """Curves over the load, one for each server and statistic."""
    levels = results["levels"]
    if not levels:
        return None
    series: dict[str, list[Point]] = {}
    for name in results["servers"]:
        for what, read in of.items():
            rows = [(level["value"], level["servers"].get(name)) for level in levels]
            found = [(x, y) for x, row in rows if row and (y := read(row)) is not None]
            if found:
                series[" ".join(filter(None, [name, what]))] = sorted(found)
    if not any(y > 0 for points in series.values() for _, y in points):
        return None
    return curves(title, series, f"{AXES[levels[0]['kind']]}; {unit}")


def over_day(results: Mapping[str, Any], name: str, title: str, scale: float) -> Picture | None:
    """A value hour by hour, each server in a colour of its own; the last load that was a day."""
    days = [level for level in results["levels"] if level["kind"] == "day"]
    if not days:
        return None
    series: dict[str, list[Point]] = {}
    for server, row in days[-1]["servers"].items():
        hours = [(h["hour"], h["until"], h[name]) for h in row.get("day", [])]
        points = [((a + b) / 2, scale * y) for a, b, y in hours if y is not None]
        if points:
            series[server] = points
    highest = max((y for points in series.values() for _, y in points), default=0.0)
    return hourly(f"{title}", series, highest) if highest > 0 else None


def hourly(title: str, series: Mapping[str, Sequence[Point]], highest: float) -> Picture:
    """Curves over the hours of a day."""
    top, bottom, high = 30.0, 230.0, 1.1 * highest

    def at(hour: float, value: float) -> Point:
        return 36 + (WIDTH - 62) * hour / 24.0, bottom - (bottom - top) * value / high

    marks = []
    for tick in svg.steps_between(0.0, high):
        y = at(0, tick)[1]
        marks += [svg.line(28, y, WIDTH, y), svg.text(22, y + 4, f"{tick:g}", "small", "end")]
    for hour in range(0, 25, 4):
        marks.append(svg.text(at(hour, 0)[0], bottom + 16, f"{hour}", "small", "middle"))
    entries = []
    for n, (name, points) in enumerate(series.items()):
        kind = COLOURS[n % len(COLOURS)]
        entries.append((kind, name))
        marks.append(svg.curve([at(x, y) for x, y in points], kind))
    legend, y = svg.legend(bottom + 38, entries)
    told, y = svg.notes(y, "hour of the compressed day")
    return Picture(title, y + 8, (*marks, *legend, *told))
