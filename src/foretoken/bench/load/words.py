"""A load test in words: the table's cells, the sentences on top, the facts below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.bench.load.ratios import RATIOS
from foretoken.bench.words import MISSING, times

COLUMNS = (
    "load", "server", "tokens/s", "requests/s", "in flight", "TTFT p50", "TTFT p95",
    "TPOT p50", "TPOT p95", "latency p50", "latency p95", "latency p99", "queue p50", "good",
    "good tokens/s", "answered", "errors",
)  # fmt: skip
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
GUIDE = {
    "tokens/s": "output tokens of answered requests that came within the steady part, over its "
    "seconds. In brackets the 95 % bootstrap interval over requests (closed loop: with the number "
    "in flight as it was; open loop: with the arrivals as they were).",
    "steady part": "closed loop: from when every client had its first answer to when the last "
    "request was sent. Poisson: after the first tenth of the time, to the last arrival. Day: the "
    "whole day. Latencies are of requests sent (open loop: due) within it.",
    "TTFT": "milliseconds to the first piece of text, from when the request was due: in an open "
    "loop that is its scheduled arrival, so a request that had to wait to be sent counts its wait.",
    "TPOT": "milliseconds per output token after the first, of one request: from its first to its "
    "last piece of text, over its tokens less one. Where the first piece holds several tokens, as "
    "guesses that stand do, it is a little too low.",
    "latency": "milliseconds from when the request was due to the end of its answer. A 99th "
    "percentile of fewer than a hundred requests is little more than the slowest one.",
    "queue": "an estimate from outside: TTFT less the least TTFT that this server showed for the "
    "same family of prompts at any load.",
    "good": "requests sent within the steady part that were answered within the targets "
    "(--slo-ttft, --slo-tpot), of all that were sent, but for those that Ctrl-C cut off before it "
    "was told; good tokens/s: tokens of these alone.",
    "ratios": "the first server over another one, on the same requests, resampled in pairs. Above "
    "1 is better for tokens/s, below 1 for times.",
}


def table(results: Mapping[str, Any]) -> tuple[list[str], list[dict[str, str]]]:
    """The columns that some line fills, and the cells of every load and server by column."""
    lines = [
        cells_of(level["label"], name, row)
        for level in results["levels"]
        for name, row in level["servers"].items()
    ]
    return [c for c in COLUMNS if any(line.get(c, MISSING) != MISSING for line in lines)], lines


def cells_of(load: str, server: str, row: Mapping[str, Any]) -> dict[str, str]:
    """One line of the table by column; what is not known is MISSING."""
    cells = {"load": load, "server": server, "answered": f"{row['answered']}/{row['requests']}"}
    cells["errors"] = ", ".join(f"{n['count']} {kind}" for kind, n in row["errors"].items())
    cells["errors"] = cells["errors"] or MISSING
    if "throughput" not in row:
        return cells
    speed, good = row["throughput"], row["goodput"]
    cells |= {
        "tokens/s": spanned(speed["tokens_per_second"]),
        "requests/s": f"{speed['requests_per_second']:.2f}",
        "in flight": f"{speed['in_flight']:.1f}",
    }
    for name in ("ttft", "tpot", "latency", "queue"):
        for q in ("p50", "p95", "p99"):
            cells[f"{NAMES.get(name, name)} {q}"] = milliseconds(row[name], q)
    if good is not None:
        cells["good"] = f"{100 * good['share']['value']:.0f} %"
        cells["good tokens/s"] = spanned(good["tokens_per_second"])
    return cells


def spanned(found: Mapping[str, Any]) -> str:
    """A number and its interval."""
    text = f"{found['value']:.1f}"
    return text + (f" [{span[0]:.1f}, {span[1]:.1f}]" if (span := found["interval"]) else "")


def milliseconds(found: Mapping[str, Any] | None, q: str) -> str:
    """A percentile of seconds in milliseconds, with three figures or more."""
    if found is None:
        return MISSING
    value = 1000 * found[q]["value"]
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def summary(results: Mapping[str, Any]) -> list[str]:
    """The result in sentences: the most each server did, and how servers compare."""
    told = []
    for name in results["servers"]:
        reached = [
            (level["servers"][name]["throughput"]["tokens_per_second"]["value"], level)
            for level in results["levels"]
            if "throughput" in level["servers"].get(name, {})
        ]
        if not reached:
            told.append(f"**{name}** answered nothing.")
            continue
        most, level = max(reached, key=lambda one: one[0])
        row = level["servers"][name]
        text = f"**{name}**: at most {most:.1f} tokens/s, at {level['label']}"
        if row["ttft"] is not None:
            text += f" (TTFT p50 {milliseconds(row['ttft'], 'p50')} ms)"
        told.append(f"{text}.")
    return told


def ratio_table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The first server over the others at every load; no lines with one server."""
    names = ["tokens_per_second", *(f"{name}_p{q}" for name, q in RATIOS)]
    heads = ["tokens/s", *(f"{NAMES[name]} p{q}" for name, q in RATIOS)]
    lines = [
        [level["label"], pair, *(ratio(found.get(name)) for name in names)]
        for level in results["levels"]
        for pair, found in level["over"].items()
    ]
    return ["load", "servers", *heads], lines


def ratio(found: Mapping[str, Any] | None) -> str:
    return MISSING if found is None or found["value"] is None else times(found)


def family_table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Every family of prompts at every load."""
    lines = []
    for level in results["levels"]:
        for name, row in level["servers"].items():
            for family, one in row.get("families", {}).items():
                good = one["good_share"]
                lines.append([
                    level["label"], name, family, f"{one['tokens_per_second']:.1f}",
                    *(milliseconds(one[what], q) for what, q in (
                        ("ttft", "p50"), ("ttft", "p95"), ("tpot", "p50"), ("latency", "p50"),
                        ("latency", "p95"),
                    )),
                    MISSING if good is None or not asked(results) else f"{100 * good:.0f} %",
                    f"{one['answered']}/{one['requests']}",
                ])  # fmt: skip
    heads = ["TTFT p50", "TTFT p95", "TPOT p50", "latency p50", "latency p95", "good", "answered"]
    return ["load", "server", "family", "tokens/s", *heads], lines


def asked(results: Mapping[str, Any]) -> bool:
    """Whether targets were named."""
    return any(value is not None for value in results["setting"]["slo"].values())


def cut_table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """What was left out as warm-up and tail, and what the load generator itself took."""
    lines = []
    for level in results["levels"]:
        for name, row in level["servers"].items():
            if (cut := row.get("steady")) is None:
                continue
            own = row["client"]
            lines.append([
                level["label"], name,
                f"{cut['seconds']:.1f} s, {cut['requests']} requests",
                f"{cut['warm_up_seconds']:.1f} s, {cut['warm_up_requests']}",
                f"{cut['tail_seconds']:.1f} s, {cut['tail_requests']}",
                f"{row['tokens']:.1f}, {row['tokens_from']}",
                f"{100 * own['cpu_share']:.0f} %",
                f"{1000 * own['lag_p99']:.1f}, {1000 * own['lag_max']:.1f} ms",
                f"{1000 * own['late_p99']:.1f} ms",
            ])  # fmt: skip
    return [
        "load", "server", "steady part", "warm-up", "tail", "tokens of an answer, counted by",
        "generator's share of a core", "its event loop late: p99, most", "requests sent late: p99",
    ], lines  # fmt: skip


def rules(results: Mapping[str, Any]) -> list[str]:
    """How warm-up and tail were cut."""
    rows = [row for level in results["levels"] for row in level["servers"].values()]
    return list(dict.fromkeys(r for row in rows if "steady" in row for r in row["steady"]["rules"]))


def faults(results: Mapping[str, Any]) -> list[str]:
    """Errors with what was said the first time."""
    return [
        f"{name} at {level['label']}: {one['count']} {kind} ({one['example']})"
        for level in results["levels"]
        for name, row in level["servers"].items()
        for kind, one in row["errors"].items()
    ]


def facts(results: Mapping[str, Any]) -> dict[str, str]:
    """Servers, prompts, requests and machine in words."""
    place, setting, prompts = results["environment"], results["setting"], results["prompts"]
    writing = setting["writing"]
    return {
        **{name: f"model {one['model']}" for name, one in results["servers"].items()},
        "prompts": f"{prompts['given']} of {', '.join(prompts['families'])}; {prompts['digest']}",
        "requests": f"{writing['endpoint']}, at most {writing['max_tokens']} tokens, temperature "
        f"{writing['temperature']:g}"
        + ("" if writing["seed"] is None else f", seed {writing['seed']}")
        + (", streamed" if writing["stream"] else ", in one piece")
        + (", end tokens ignored" if writing["ignore_eos"] else ""),
        "loads": f"{', '.join(setting['levels'])}; {amount(setting)}, {setting['turns']} turn(s) "
        f"of each server; {setting['warm_up_requests']} requests before, not measured",
        **({"targets": told} if (told := targets(setting["slo"])) else {}),
        "processor": f"{place['cpu']}, {place['cores']} cores, load average "
        f"{', '.join(f'{value:g}' for value in place['load_average'])}",
        "versions": f"foretoken {place['foretoken']}, Python {place['python']}, {place['system']}",
        **({"GPU": place["gpu"]} if place["gpu"] else {}),
        "date": place["date"],
    }


def amount(setting: Mapping[str, Any]) -> str:
    """How much was asked of every load."""
    parts = [f"{setting[name]:g} {name}" for name in ("requests", "seconds") if setting[name]]
    return " or ".join(parts) or "as many requests as a load needs"


def targets(slo: Mapping[str, float | None]) -> str:
    """The service level objectives."""
    return ", ".join(
        f"{NAMES[name]} at most {1000 * value:g} ms" for name, value in slo.items() if value
    )


def piped(columns: Sequence[str], rows: Sequence[Sequence[str]], text: int) -> list[str]:
    """A table in Markdown whose first columns are text."""
    marks = ["---"] * text + ["---:"] * (len(columns) - text)
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join(marks) + "|"]
    return lines + ["| " + " | ".join(c.replace("|", "/") for c in row) + " |" for row in rows]
