"""A tuning on paper: tuned.json, results.json, report.md and page.html with its pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.bench.files import replace
from foretoken.bench.svg import standalone
from foretoken.bench.tune import words
from foretoken.bench.tune.page import html, pictures_of
from foretoken.engine.tuned import NAME, Tuned

NAMES = ("results.json", "report.md", "page.html")  # beside the configuration


def write_reports(results: Mapping[str, Any], tuned: Tuned, out: Path) -> dict[str, Path]:
    """Write everything, each file whole or not at all; the configuration first."""
    written = {"tuned": replace(out / NAME, tuned.to_json())}
    data, report, page = (out / name for name in NAMES)
    written["json"] = replace(data, json.dumps(results, indent=1) + "\n")
    pictures = pictures_of(results)
    for name, picture in pictures.items():
        written[name] = replace(out / "plots" / f"{name}.svg", standalone(picture))
    links = {name: f"plots/{name}.svg" for name in pictures}
    written["markdown"] = replace(report, markdown(results, links))
    written["html"] = replace(page, html(results, pictures))
    return written


def markdown(results: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The choice, the table, what training would be worth, and links to the pictures."""
    lines = [f"# {results['title']}", "", words.summary(results), ""]
    for warning in results["warnings"]:
        lines += [f"> **Warning:** {warning}.", ""]
    columns, table = words.table(results)
    lines += [*piped(columns, table.values()), ""]
    for label, row in results["rows"].items():
        if row["failed"]:
            lines.append(f"- {label}: {row['failed']}")
    lines += ["", "## What training a draft would be worth", ""]
    columns, costs = words.worth_table(results["worth"])
    lines += [*piped(columns, costs), ""]
    lines += [f"{line}\n" for line in words.worth_words(results["worth"])]
    lines += ["## Measured on", "", *(f"- {k}: {v}" for k, v in words.facts(results).items()), ""]
    lines += [f"![{name}]({path})" for name, path in pictures.items()]
    return "\n".join(lines) + "\n"


def piped(columns: list[str], rows: Any) -> list[str]:
    """A table in Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for cells in rows:
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return lines
