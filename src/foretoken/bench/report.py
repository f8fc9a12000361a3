"""A bench on paper: results.json, report.md, plots/*.svg and report.html."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretoken.bench import words
from foretoken.bench.files import replace
from foretoken.bench.page import html
from foretoken.bench.plots import draw
from foretoken.bench.svg import standalone

Pictures = Mapping[str, str]
NAMES = ("results.json", "report.md", "report.html")


def write_reports(results: Mapping[str, Any], out: Path) -> dict[str, Path]:
    """Write everything, each file whole or not at all; returns the files."""
    return write_files(results, out, draw(results), markdown, html, NAMES)


def write_files(
    results: Mapping[str, Any],
    out: Path,
    pictures: Pictures,
    as_markdown: Callable[[Mapping[str, Any], Mapping[str, str]], str],
    as_html: Callable[[Mapping[str, Any], Pictures], str],
    names: tuple[str, str, str],
) -> dict[str, Path]:
    """Pictures, and the results as JSON, Markdown and HTML, under these names."""
    drawn = {
        name: replace(out / "plots" / f"{name}.svg", standalone(picture))
        for name, picture in pictures.items()
    }
    links = {name: f"plots/{path.name}" for name, path in drawn.items()}
    texts = (
        json.dumps(results, indent=1) + "\n", as_markdown(results, links),
        as_html(results, pictures),
    )  # fmt: skip
    files = zip(("json", "markdown", "html"), names, texts, strict=True)
    return {kind: replace(out / name, text) for kind, name, text in files} | drawn


def markdown(results: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The table, what was measured, and links to the pictures."""
    lines = [f"# {results['title']}", "", words.summary(results), ""]
    for warning in results.get("warnings", []):
        lines += [f"> **Warning:** {warning}.", ""]
    columns, table = words.table(results)
    lines += ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for cells in table.values():
        shown = [cells.get(column, words.MISSING).replace("|", "/") for column in columns]
        lines.append("| " + " | ".join(shown) + " |")
    failed = {label: row["failed"] for label, row in results["rows"].items() if row["failed"]}
    lines += ["", *(f"- **{label}** failed: {why}" for label, why in failed.items())]
    notes = {label: note for label, note in results.get("notes", {}).items() if note}
    lines += [*(f"- {label}: {note}" for label, note in notes.items()), ""]
    lines += ["## Measured on", "", *(f"- {k}: {v}" for k, v in words.facts(results).items()), ""]
    lines += [f"![{name}]({path})" for name, path in pictures.items()]
    return "\n".join(lines) + "\n"
