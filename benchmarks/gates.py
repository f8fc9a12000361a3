"""What a measurement has to show, held against what it showed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foretoken.bench.files import replace


@dataclass(frozen=True, slots=True)
class Gate:
    """A claim with its bound."""

    claim: str
    measured: float | None  # None: could not be measured
    bound: float
    at_least: bool = True
    unit: str = ""

    @property
    def holds(self) -> bool:
        if self.measured is None:
            return False
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}

    def cells(self) -> tuple[str, str, str, str]:
        side = "at least" if self.at_least else "at most"
        measured = "not measured" if self.measured is None else f"{self.measured:.2f}{self.unit}"
        verdict = "holds" if self.holds else "fails"
        return self.claim, f"{side} {self.bound:g}{self.unit}", measured, verdict


def show(gates: Sequence[Gate], title: str) -> None:
    """The verdicts on the terminal."""
    table = Table("claim", "wanted", "measured", "verdict", title=title)
    for gate in gates:
        table.add_row(*map(escape, gate.cells()), style=None if gate.holds else "red")
    Console().print(table)


def markdown(gates: Sequence[Gate]) -> str:
    """The verdicts as a table."""
    lines = ["| claim | wanted | measured | verdict |", "|---|---|---|---|"]
    return "\n".join(lines + ["| " + " | ".join(gate.cells()) + " |" for gate in gates]) + "\n"


def publish(out: Path, name: str, document: Mapping[str, Any], text: str) -> list[Path]:
    """Write NAME.json and NAME.md."""
    return [
        replace(out / f"{name}.json", json.dumps(document, indent=1) + "\n"),
        replace(out / f"{name}.md", text),
    ]


def speed(results: Mapping[str, Any], label: str, *, whole: bool = False) -> float | None:
    """Tokens per second of a row, None where it failed: the median over prompts, or of the `whole`.

    Medians of two rows can be of different prompts; all tokens over all seconds cannot.
    """
    row = results["rows"].get(label, {"failed": "not asked for"})
    if row["failed"] or "tokens_per_second" not in row:
        return None  # what it wrote before it failed is of fewer prompts than others wrote
    return row["total_tokens_per_second"] if whole else row["tokens_per_second"]["value"]


def ratio(
    results: Mapping[str, Any], above: str | None, below: str | None, *, whole: bool = False
) -> float | None:
    """How many times faster one row is than another; None where either failed."""
    speeds = [speed(results, label, whole=whole) if label else None for label in (above, below)]
    return speeds[0] / speeds[1] if speeds[0] is not None and speeds[1] else None


def best(
    results: Mapping[str, Any], wanted: Callable[[str], bool], *, whole: bool = False
) -> str | None:
    """The fastest row that `wanted` accepts."""
    found = {
        label: speed(results, label, whole=whole) for label in results["rows"] if wanted(label)
    }
    known = {label: value for label, value in found.items() if value is not None}
    return max(known, key=lambda label: known[label]) if known else None


def speeds(results: Mapping[str, Any]) -> str:
    """Rows with speed and accepted length."""
    lines = ["| row | tokens/s | over plain | accepted length |", "|---|---:|---:|---:|"]
    for label, row in results["rows"].items():
        if "tokens_per_second" not in row:
            lines.append(f"| {label} | failed: {row['failed']} | | |")
            continue
        over = (row["speedup"].get("plain") or {}).get("value")
        mean = row["accepted_length"]["emitted_per_forward"]
        values = (row["tokens_per_second"]["value"], over, mean)
        lines.append(
            f"| {label} | " + " | ".join("-" if v is None else f"{v:.2f}" for v in values) + " |"
        )
    return "\n".join(lines) + "\n"
