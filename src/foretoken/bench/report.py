"""A bench on paper: results.json, report.md, plots/*.png and report.html."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.bench import words
from foretoken.bench.page import html
from foretoken.bench.plots import draw


def write_reports(results: Mapping[str, Any], out: Path) -> dict[str, Path]:
    """Write everything; returns the files."""
    pictures = draw(results, out / "plots")
    files = {
        "json": out / "results.json",
        "markdown": out / "report.md",
        "html": out / "report.html",
    }
    files["json"].write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    links = {name: f"plots/{path.name}" for name, path in pictures.items()}
    files["markdown"].write_text(markdown(results, links), encoding="utf-8")
    files["html"].write_text(html(results, pictures), encoding="utf-8")
    return files | pictures


def markdown(results: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The table, what was measured, and links to the pictures."""
    lines = [f"# {results['title']}", "", words.summary(results), ""]
    lines += [
        "| " + " | ".join(words.COLUMNS) + " |",
        "|---" + "|---:" * (len(words.COLUMNS) - 1) + "|",
    ]
    for label, row in results["rows"].items():
        lines.append("| " + " | ".join(words.cells_of(label, row)) + " |")
    failed = {label: row["failed"] for label, row in results["rows"].items() if row["failed"]}
    lines += ["", *(f"- **{label}** failed: {why}" for label, why in failed.items())]
    notes = {label: note for label, note in results.get("notes", {}).items() if note}
    lines += [*(f"- {label}: {note}" for label, note in notes.items()), ""]
    lines += ["## Measured on", "", *(f"- {k}: {v}" for k, v in words.facts(results).items()), ""]
    lines += [f"![{name}]({path})" for name, path in pictures.items()]
    return "\n".join(lines) + "\n"
