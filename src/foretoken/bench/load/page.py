"""One self-contained page of a load test, in the style of a bench's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from foretoken.bench.load import words
from foretoken.bench.page import PAGE, ratio_tile, tile
from foretoken.bench.svg import COLOURS, MARKS, Picture
from foretoken.bench.words import MISSING

FIRST = ("throughput", "ttft", "day", "day-ttft")  # pictures that come before the table


def html(results: Mapping[str, Any], pictures: Mapping[str, Picture]) -> str:
    """The page as text."""
    facts = words.facts(results)
    columns, lines = words.table(results)
    drawn = {name: f"<figure>{picture.inline()}</figure>" for name, picture in pictures.items()}
    warned = "".join(
        f'<p class="warning"><b>Warning:</b> {escape(text)}.</p>' for text in results["warnings"]
    )
    told = "".join(f"<p>{escape(t).replace('**', '')}</p>" for t in words.summary(results))
    return PAGE.substitute(
        title=escape(results["title"]),
        colours=COLOURS,
        marks=MARKS,
        subtitle=f"{escape(', '.join(results['servers']))} \u00b7 {escape(facts['date'])}",
        warnings=warned + told,
        tiles="".join(tiles(results)),
        speed="".join(drawn[name] for name in drawn if name in FIRST),
        head="".join(f"<th>{escape(column)}</th>" for column in columns),
        body="".join(row([line.get(c, MISSING) for c in columns], columns) for line in lines),
        bounds=sections(results),
        plots="".join(drawn[name] for name in drawn if name not in FIRST),
        guide="".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in words.GUIDE.items()),
        facts="".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()),
    )


def tiles(results: Mapping[str, Any]) -> list[str]:
    """The most each server did; with several, how the first compares at that load."""
    found = []
    for name in results["servers"]:
        rows = [level["servers"].get(name, {}) for level in results["levels"]]
        speeds = [row["throughput"]["tokens_per_second"]["value"] for row in rows
                  if "throughput" in row]  # fmt: skip
        if speeds:
            found.append(tile(f"{max(speeds):.1f}", f"tokens/s at most: {name}"))
    for level in results["levels"]:
        for pair, ratios in level["over"].items():
            if ratios["tokens_per_second"]["value"] is not None:
                text = f"tokens/s at {level['label']}: {pair}"
                found.append(ratio_tile(ratios["tokens_per_second"], text))
    return found


def row(cells: Sequence[str], columns: Sequence[str]) -> str:
    """A line of a table; intervals go below their values."""
    made = []
    for column, said in zip(columns, cells, strict=True):
        value, *rest = escape(said).split(" [", 1)
        shown = value + "".join(f"<small>[{part}</small>" for part in rest)
        made.append(f'<td data-name="{escape(column)}">{shown}</td>')
    return f"<tr>{''.join(made)}</tr>"


def sections(results: Mapping[str, Any]) -> str:
    """Comparison, families, cuts and errors below the table."""
    text = ""
    for title, (columns, rows) in (
        ("Servers compared", words.ratio_table(results)),
        ("Families of prompts", words.family_table(results)),
        ("What was cut, and what the load generator took", words.cut_table(results)),
    ):
        if rows:
            head = "".join(f"<th>{escape(column)}</th>" for column in columns)
            body = "".join(row(cells, columns) for cells in rows)
            made = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            text += f'<h2>{title}</h2><div class="card">{made}</div>'
    text += "".join(f"<p>Steady part: {escape(rule)}.</p>" for rule in words.rules(results))
    if errors := words.faults(results):
        text += f"<h2>Errors</h2><ul>{''.join(f'<li>{escape(e)}</li>' for e in errors)}</ul>"
    return text
