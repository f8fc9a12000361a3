"""A load test on paper: load.json, load.md, plots/*.svg and page.html."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.bench.load import words
from foretoken.bench.load.page import html
from foretoken.bench.load.plots import draw
from foretoken.bench.report import write_files
from foretoken.bench.words import MISSING

NAMES = ("load.json", "load.md", "page.html")


def write_reports(results: Mapping[str, Any], out: Path) -> dict[str, Path]:
    """Write everything, each file whole or not at all; returns the files."""
    return write_files(results, out, draw(results), markdown, html, NAMES)


def markdown(results: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The tables, how the numbers came about, and links to the pictures."""
    lines = [f"# {results['title']}", ""]
    for text in results["warnings"]:
        lines += [f"> **Warning:** {text}.", ""]
    lines += brief(results)
    heads, found = words.family_table(results)
    lines += ["## Families of prompts", "", *words.piped(heads, found, 3), ""]
    lines += ["## How to read this", "", *(f"- {k}: {v}" for k, v in words.GUIDE.items()), ""]
    lines += ["## Measured on", "", *(f"- {k}: {v}" for k, v in words.facts(results).items()), ""]
    lines += [f"![{name}]({path})" for name, path in pictures.items()]
    return "\n".join(lines) + "\n"


def brief(results: Mapping[str, Any]) -> list[str]:
    """What a terminal shows: the answer, every load, the comparison, what was cut, errors."""
    columns, cells = words.table(results)
    rows = [[line.get(column, MISSING) for column in columns] for line in cells]
    lines = [*(f"- {text}" for text in words.summary(results)), ""]
    lines += [*words.piped(columns, rows, 2), "", "Times are in milliseconds.", ""]
    for title, (heads, found) in (
        ("Servers compared", words.ratio_table(results)),
        ("What was cut, and what the load generator took", words.cut_table(results)),
    ):
        if found:
            lines += [f"## {title}", "", *words.piped(heads, found, 2), ""]
    lines += [*(f"Steady part: {rule}.\n" for rule in words.rules(results))]
    if errors := words.faults(results):
        lines += ["## Errors", "", *(f"- {text}" for text in errors), ""]
    return lines
