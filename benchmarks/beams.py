"""Speculative beams against plain beam sampling of the same width: time, and the score it costs.

    python benchmarks/beams.py                  # the shipped pair, 300 prompts
    python benchmarks/beams.py --params 350M --per-family 5
    python benchmarks/beams.py --quick

Temperature 1. Time is that of a token of depth: what all beams of a prompt need to grow by one. The
score of a prompt is the mean log-likelihood of a token of its best text, under the target. Writes
benchmarks/results/beams.json and .md, with the widened size in the name where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import gates
import torch
from pair import console, main, pair, parser, prompts
from rich.progress import track

from foretoken import load
from foretoken.bench.environment import describe
from foretoken.bench.intervals import interval

Interval = tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt under one row."""

    seconds: float
    grown: int  # tokens of depth
    forwards: int
    width: float  # beams drawn per token
    score: float  # of the best text
    texts: int
    accepted: int
    drafted: int


def rows_of(width: int, depths: Sequence[int]) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is compared: label -> method and options."""
    beams = {"num_beams": width}
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        "sampling": ("beam-sampling", {"num_beams": 1}),
        "beam-sampling": ("beam-sampling", beams),
    }
    for depth in depths:
        drafted = {**beams, "depth": depth}
        rows[f"dsbd[depth={depth}]"] = ("dsbd", drafted)
        rows[f"dsbd[depth={depth},min_width={width}]"] = ("dsbd", {**drafted, "min_width": width})
        rows[f"dsbd[depth={depth},keep_one=true]"] = ("dsbd", {**drafted, "keep_one": True})
    return rows


def measure(session: Any, prompt: Any, tokens: int, seed: int) -> Cell:
    """One text set, alone on the machine."""
    found = session.generate(prompt, tokens, temperature=1.0, seed=seed)
    stats = found.stats
    return Cell(
        stats.seconds, stats.grown, stats.target_forwards, stats.mean_width, found.scores[0],
        len(found.scores), stats.accepted, stats.drafted,
    )  # fmt: skip


def pace(cells: Sequence[Cell], which: Sequence[int]) -> float:
    """Seconds per token of depth."""
    return sum(cells[i].seconds for i in which) / sum(cells[i].grown for i in which)


def summary(cells: dict[str, list[Cell]], label: str) -> dict[str, Any]:
    """A row beside plain beam sampling, paired by prompt."""
    own, base = cells[label], cells["beam-sampling"]
    every = range(len(own))

    def faster(which: Sequence[int]) -> float:
        return pace(base, which) / pace(own, which)

    def better(which: Sequence[int]) -> float:
        return fmean(own[i].score - base[i].score for i in which)

    drafted = sum(cell.drafted for cell in own)
    return {
        "ms_per_token": 1e3 * pace(own, every),
        "tokens_per_forward": sum(c.grown for c in own) / sum(c.forwards for c in own),
        "mean_width": fmean(cell.width for cell in own),
        "texts": fmean(cell.texts for cell in own),
        "acceptance": sum(c.accepted for c in own) / drafted if drafted else None,
        "score": fmean(cell.score for cell in own),
        "score_gain": {"value": better(every), "interval": interval(better, len(own))},
        "speedup": {"value": faster(every), "interval": interval(faster, len(own))},
    }


def verdicts(rows: dict[str, dict[str, Any]], width: int) -> list[gates.Gate]:
    """The bounds: time at the same law, time at the same score, and the order of scores."""
    guessed = {label: row for label, row in rows.items() if label.startswith("dsbd")}
    fixed = {label: row for label, row in guessed.items() if "min_width" in label}
    no_worse = {label: row for label, row in guessed.items() if upper(row["score_gain"]) >= 0.0}
    found = []
    for what, of in (("the same law", fixed), ("a score not below", no_worse)):
        best = max(of, key=lambda label: of[label]["speedup"]["value"], default=None)
        value = None if best is None else of[best]["speedup"]["value"]
        claim = f"{best or 'dsbd'} over beam sampling of {width}: {what}"
        found.append(gates.Gate(claim, value, 1.5, unit="x"))
    dynamic = [row for label, row in guessed.items() if label.endswith("]") and "," not in label]
    score = fmean(row["score"] for row in dynamic)
    found.append(gates.Gate("score of dsbd over sampling", score - rows["sampling"]["score"], 0.0))
    lead = max(upper(row["score_gain"], low=True) for row in dynamic)
    found.append(gates.Gate("score of dsbd over beam sampling's", lead, 0.0, at_least=False))
    return found


def upper(gain: dict[str, Any], low: bool = False) -> float:
    """The end of an interval, or the value where there is none."""
    if gain["interval"] is None:
        return float(gain["value"])
    return float(gain["interval"][0 if low else 1])


def report(document: dict[str, Any], found: list[gates.Gate]) -> str:
    """The page."""
    lines = [
        f"# {document['title']}", "",
        "| row | ms per token | over beam sampling | tokens per forward | width | texts | "
        "score | score gain |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for label, row in document["rows"].items():
        lines.append(
            f"| {label} | {row['ms_per_token']:.2f} | {told(row['speedup'], 2)} | "
            f"{row['tokens_per_forward']:.2f} | {row['mean_width']:.2f} | {row['texts']:.2f} | "
            f"{row['score']:.3f} | {told(row['score_gain'], 3)} |"
        )
    facts = [f"- {name}: {value}" for name, value in document["environment"].items()]
    return "\n".join(
        [*lines, "", "## Bounds", "", gates.markdown(found), "## Measured on", "", *facts, ""]
    )


def told(value: dict[str, Any], digits: int) -> str:
    """A number with its interval."""
    text = f"{value['value']:.{digits}f}"
    if value["interval"] is None:
        return text
    low, high = value["interval"]
    return f"{text} ({low:.{digits}f} to {high:.{digits}f})"


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--params", help="size to widen the shipped target to")
    options.add_argument("--per-family", type=int, default=50, help="prompts of each family")
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--num-beams", type=int, default=4)
    options.add_argument("--depths", type=int, nargs="+", default=[2, 3, 4], help="layers drafted")
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    tokens = 8 if asked.quick else asked.max_new_tokens
    tasks = prompts(1, limit=3) if asked.quick else prompts(asked.per_family)
    depths = asked.depths[:1] if asked.quick else asked.depths
    wanted = rows_of(asked.num_beams, depths)
    cells: dict[str, list[Cell]] = {label: [] for label in wanted}
    with pair(asked.target, asked.draft, asked.params) as models:
        first = load(models.target, "dsbd", models.draft, dtype="float32")
        sessions = {label: first.using(name, **config) for label, (name, config) in wanted.items()}
        for session in sessions.values():  # buffers grow and kernels are chosen before it counts
            measure(session, tasks[0].turns[0], min(tokens, 16), 0)
        for seed, task in enumerate(track(tasks, "prompts", console=console)):
            for label, session in sessions.items():
                cells[label].append(measure(session, task.turns[0], tokens, seed))
    rows = {label: summary(cells, label) for label in wanted}
    found = verdicts(rows, asked.num_beams)
    document = {
        "title": f"Speculative beams against beam sampling of {asked.num_beams}",
        "params": asked.params,
        "prompts": len(tasks),
        "max_new_tokens": tokens,
        "rows": rows,
        "gates": [gate.to_dict() for gate in found],
        "environment": describe(),
        "cells": {label: [asdict(cell) for cell in own] for label, own in cells.items()},
    }
    name = "beams" if asked.params is None else f"beams-{asked.params}"
    gates.publish(asked.out, name, document, report(document, found))
    gates.show(found, document["title"])
    return 0


if __name__ == "__main__":
    main(run, __doc__)
