"""One self-contained page that shows why: the choice, every candidate, every round, the costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from foretoken.bench.catalogue import group
from foretoken.bench.page import PAGE, ratio_tile, tile
from foretoken.bench.plots import curves, scoring_costs, speedups
from foretoken.bench.svg import COLOURS, MARKS, Picture
from foretoken.bench.tune import words
from foretoken.bench.tune.halving import PLAIN

GUIDE = {
    "over plain": "tokens per second over plain decoding's on the same prompt: geometric mean over "
    "prompts; in brackets the 95 % bootstrap interval over prompts. The prompt's own forward is "
    "counted.",
    "tokens/s": "plain decoding's over all prompts times this ratio: candidates were measured on "
    "different numbers of prompts.",
    "rounds": "all candidates write the same prompts in turn; after each round the better half "
    "stays, ranked by how fast they may still be. Whoever left early was measured on few prompts.",
    "the choice": "the fastest; where a simpler candidate is as good (not told apart, and less "
    "than 2 % behind), that one.",
    "accepted length": "emitted tokens per target forward. 1 is plain decoding.",
    "text as plain": "texts whose tokens are exactly those that plain decoding wrote; not counted "
    "where they are drawn, at temperatures above 0.",
}


def pictures_of(results: Mapping[str, Any]) -> dict[str, Picture]:
    """Every picture there are numbers for, by name."""
    rows = {label: row for label, row in results["rows"].items() if "tokens_per_second" in row}
    made = {
        "speedup": speedups(rows),
        "progress": progress([one for one in results["rounds"] if one["of"] == "candidates"]),
        "scoring": scoring_costs(results["scoring"]),
    }
    for number, one in enumerate(results["rounds"], 1):
        standing = {
            label: {**rows[label], "speedup": {} if label == PLAIN else {PLAIN: found}}
            for label, found in one["standings"].items()
            if label in rows
        }
        drawn = speedups(standing)
        if drawn is not None:
            title = f"Round {number}, {one['of']}: {one['prompts']} prompts"
            made[f"round-{number}"] = replace(drawn, title=title)
    return {name: picture for name, picture in made.items() if picture is not None}


def progress(rounds: list[Mapping[str, Any]]) -> Picture | None:
    """How the standings moved as prompts were added; of those that were there more than once."""
    lines: dict[str, dict[float, float]] = {}
    for one in rounds:
        for label, found in one["standings"].items():
            if label != PLAIN:
                lines.setdefault(label, {})[float(found["prompts"])] = found["value"]
    shown = {label: list(points.items()) for label, points in lines.items() if len(points) > 1}
    if not shown:
        return None
    note = "prompts measured so far; times plain's tokens per second"
    return curves("Standings as prompts were added", shown, note, zero=False)


def html(results: Mapping[str, Any], pictures: Mapping[str, Picture]) -> str:
    """The page as text, in the style of a bench's."""
    facts = words.facts(results)
    columns, table = words.table(results)
    drawn = {name: figure(picture) for name, picture in pictures.items()}
    names = " with ".join(escape(str(name)) for name in results["models"].values() if name)
    summary = escape(words.summary(results).replace("**", ""))
    warned = "".join(
        f'<p class="warning"><b>Warning:</b> {escape(text)}.</p>' for text in results["warnings"]
    )
    return PAGE.substitute(
        title=escape(results["title"]),
        colours=COLOURS,
        marks=MARKS,
        subtitle=f"{names} \u00b7 {escape(facts['numbers'])} \u00b7 {escape(facts['date'])}",
        warnings=f"{warned}<p>{summary}</p>",
        tiles="".join(tiles(results)),
        speed="".join(drawn[name] for name in drawn if name in ("speedup", "progress")),
        head="".join(f"<th>{escape(column)}</th>" for column in columns),
        body="".join(table_row(label, columns, table[label], results) for label in table),
        bounds=worth_section(results["worth"]),
        plots="".join(drawn[name] for name in drawn if name not in ("speedup", "progress")),
        guide="".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in GUIDE.items()),
        facts="".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()),
    )


def tiles(results: Mapping[str, Any]) -> list[str]:
    """The numbers a reader came for."""
    row = results["rows"][results["chosen"]]
    found = []
    if over := row["speedup"].get(PLAIN):
        found.append(ratio_tile(over, f"plain's speed: {results['chosen']}, the one to use"))
    else:
        found.append(tile(PLAIN, words.why_plain(results)))
    found.append(tile(f"{row['tokens_per_second']:.1f}", "tokens per second"))
    measured = sum("tokens_per_second" in one for one in results["rows"].values())
    found.append(tile(str(measured), "configurations were measured"))
    found.append(tile(f"{results['minutes']['spent']:.1f} min", "were spent"))
    return found


def table_row(label: str, columns: list[str], cells: list[str], results: Mapping[str, Any]) -> str:
    """One candidate: its group's colour, and why it was not measured if so."""
    row = results["rows"][label]
    own = group(row["method"])
    kind = ' class="best"' if label == results["chosen"] else ""
    name = f'<i class="mark {own.replace(" ", "-")}" title="{own}"></i>{escape(cells[0])}'
    if row.get("note"):
        name += f"<small>{escape(row['note'])}</small>"
    if row["failed"]:
        wide = len(columns) - 1
        why = escape(row["failed"])
        return f'<tr{kind}><td>{name}</td><td class="why" colspan="{wide}">{why}</td></tr>'
    rest = "".join(
        f'<td data-name="{escape(column)}">{escape(cell)}</td>'
        for column, cell in zip(columns[1:], cells[1:], strict=True)
    )
    return f"<tr{kind}><td>{name}</td>{rest}</tr>"


def worth_section(worth: Mapping[str, Any]) -> str:
    """What training would be worth: the table and what it assumes."""
    columns, rows = words.worth_table(worth)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{escape(column)}">{escape(cell)}</td>'
            for column, cell in zip(columns, cells, strict=True)
        )
        + "</tr>"
        for cells in rows
    )
    told = "".join(f"<p>{escape(line)}</p>" for line in words.worth_words(worth))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h2>What training a draft would be worth</h2><div class="card">{table}</div>{told}'


def figure(picture: Picture) -> str:
    """A picture inside the page; its title says what it is."""
    return f"<figure>{picture.inline()}</figure>"
