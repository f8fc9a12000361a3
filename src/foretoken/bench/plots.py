"""Pictures of a bench: rows as sorted dots with intervals, heat maps, shares, costs.

A row has its group's colour in every picture and its name beside its marks, so nothing has to be
looked up in a legend of twenty colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.bench import svg
from foretoken.bench.catalogue import GROUPS, group
from foretoken.bench.svg import WIDTH, Picture
from foretoken.bench.words import TIMES, same, titled

PARTS = {  # of a row's time -> what it is called, its colour
    "prompt": ("prompt", "baseline"),
    "draft": ("drafting", "draft-model"),
    "target": ("target forwards", "look-up"),
    "other": ("everything else", "lossy"),
}
PITCH = 34.0  # from a row's name to the next one's
NAMES = 152.0  # room for the names beside a heat map
DEEPEST = 16  # columns of a heat map over depths; what few rows reach beyond is left out
Rows = Mapping[str, Mapping[str, Any]]


def draw(results: Mapping[str, Any]) -> dict[str, Picture]:
    """Every picture there are numbers for, by name; the fastest row first.

    Rows that failed on the way wrote some of the prompts: they are in no picture of speeds.
    """
    named = {titled(label, row): row for label, row in results["rows"].items()}
    done = {name: row for name, row in named.items() if "tokens_per_second" in row}
    rows = dict(sorted(done.items(), key=lambda one: -float(one[1]["tokens_per_second"]["value"])))
    whole = {name: row for name, row in rows.items() if not row["failed"]}
    made = {
        "speedup": speedups(whole),
        "families": by_family(whole, results["families"]),
        "acceptance": acceptance(rows),
        "steps": tokens_per_forward(rows),
        "scoring": scoring_costs(results.get("scoring")),
        "shares": shares(rows),
    }
    return {name: picture for name, picture in made.items() if picture is not None}


def colour(row: Mapping[str, Any]) -> str:
    """The class of a row's group."""
    return group(row["method"]).replace(" ", "-")


def speedups(rows: Rows) -> Picture | None:
    """Speed-up over plain: a dot and its interval per row, the fastest on top."""
    reference = next((r for r in ("plain", "hf:plain", "hf:compiled") if r in rows), None)
    found = {name: row["speedup"].get(reference) for name, row in rows.items()}
    shown = {name: (one["value"], span_of(one)) for name, one in found.items() if one}
    if not shown:
        return None
    low = min(1.0, *(span[0] for _, span in shown.values()))
    high = max(1.0, *(span[1] for _, span in shown.values()))
    edge = 0.04 * (high - low) or 0.1

    def at(value: float) -> float:
        return 6 + (WIDTH - 12) * (value - low + edge) / (high - low + 2 * edge)

    top = 42.0
    bottom = top + PITCH * len(shown) - 10
    marks = []
    for tick in svg.steps_between(low - edge, high + edge):
        marks.append(svg.line(at(tick), top - 14, at(tick), bottom))
        marks.append(svg.text(at(tick), bottom + 14, f"{tick:g}", "small number", "middle"))
    marks.append(svg.line(at(1.0), top - 14, at(1.0), bottom, "one"))
    y = top
    for name, (value, (start, stop)) in sorted(shown.items(), key=lambda item: -item[1][0]):
        told = f"{value:.2f}{TIMES}" + (f" [{start:.2f}, {stop:.2f}]" if stop > start else "")
        dot = svg.dot(at(value), y + 11, "hollow" if same(found[name]) else "ink", 5)
        marks += [
            svg.text(0, y, svg.cut(name, WIDTH - 124), "halo"),
            svg.text(WIDTH, y, told, "number halo", "end"),
            svg.group(colour(rows[name]), svg.bar(at(start), at(stop), y + 11), dot),
        ]
        y += PITCH
    entries, y = svg.legend(bottom + 38, legend_of([rows[name] for name in shown]))
    told = [f"times {reference}'s tokens per second; lines: 95 % interval over prompts"]
    if any(same(found[name]) for name in shown):
        told.append(f"hollow: not distinguishable from {reference}, the interval holds 1")
    notes, y = svg.notes(y, *told)
    return Picture(f"Speed-up over {reference}", y + 8, (*marks, *entries, *notes))


def span_of(found: Mapping[str, Any]) -> tuple[float, float]:
    """The interval of a ratio, and its value at least."""
    low, high = found["interval"] or (found["value"], found["value"])
    return min(low, found["value"]), max(high, found["value"])


def legend_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The groups that some row belongs to, with their colours."""
    seen = {group(row["method"]) for row in rows}
    return [(name.replace(" ", "-"), name) for name in GROUPS if name in seen]


@dataclass(frozen=True, slots=True)
class Square:
    """A place of a heat map: what is written there, its colour and how strong that is."""

    said: str
    colour: str
    strength: float
    unsure: bool = False


def by_family(rows: Rows, families: Sequence[str]) -> Picture | None:
    """Speed-up over plain, family by family: what pays on one kind of prompt only."""
    lines = {}
    for name, row in rows.items():
        found = [(row["families"].get(family) or {}).get("speedup") for family in families]
        if name != "plain" and any(found):
            lines[name] = [speed_square(one) for one in found]
    if not lines or len(families) < 2:
        return None
    notes = ["blue: faster than plain, red: slower; the stronger, the more"]
    if any(square and square.unsure for squares in lines.values() for square in squares):
        notes.append("slanted: not distinguishable from plain, the interval holds 1")
    return heat("Speed-up over plain by task family", families, lines, rows, notes)


def speed_square(found: Mapping[str, Any] | None) -> Square | None:
    if found is None:
        return None
    value = max(float(found["value"]), 0.01)
    away = min(abs(math.log2(value)) / 1.6, 1.0)  # three times as fast is the strongest colour
    unsure = same(found)
    strength = 0.0 if unsure else 0.08 + 0.57 * away
    return Square(f"{value:.2f}", "faster" if value >= 1 else "slower", strength, unsure)


def acceptance(rows: Rows) -> Picture | None:
    """How far guesses stand: conditional acceptance at each depth."""
    found = {name: row["acceptance"]["conditional"] for name, row in rows.items()}
    return of_depths(
        "Acceptance by depth", rows, found,
        ("depth of the guess; % accepted of those whose whole path above was accepted",),
    )  # fmt: skip


def tokens_per_forward(rows: Rows) -> Picture | None:
    """How many tokens a target forward gives: the whole distribution behind the mean."""
    found = {}
    for name, row in rows.items():
        counts = row["histogram"]["emitted_per_step"]
        longest = max(map(int, counts), default=0)
        if longest > 1:
            total = sum(counts.values())
            found[name] = [counts.get(str(n), 0) / total for n in range(1, longest + 1)]
    return of_depths(
        "Tokens written per target forward", rows, found,
        ("tokens of a forward (accepted guesses and the one that is free); % of forwards",),
    )  # fmt: skip


def of_depths(
    title: str, rows: Rows, found: Mapping[str, Sequence[float]], notes: Sequence[str]
) -> Picture | None:
    """A heat map of shares over 1, 2, 3 ... tokens."""
    known = {name: values for name, values in found.items() if values}
    if not known:
        return None
    deepest = max(map(len, known.values()))
    if deepest > DEEPEST:
        notes = [*notes, f"{DEEPEST} of {deepest} columns are shown"]
    squares = {
        name: [Square(f"{100 * v:.0f}", "look-up", 0.65 * v) for v in values[:DEEPEST]]
        for name, values in known.items()
    }
    columns = [str(n) for n in range(1, min(deepest, DEEPEST) + 1)]
    return heat(title, columns, squares, rows, notes)


def heat(
    title: str,
    columns: Sequence[str],
    lines: Mapping[str, Sequence[Square | None]],
    rows: Rows,
    notes: Sequence[str],
) -> Picture:
    """Rows by columns, a coloured square with its number at each place."""
    wide = min((WIDTH - NAMES) / len(columns), 56.0)
    words = any(len(name) * svg.LETTER > wide for name in columns)
    if words:  # turned names stand out to the right
        room = [WIDTH - NAMES - 0.78 * svg.LETTER * len(name) for name in columns]
        wide = min(wide, *(space / (n + 0.5) for n, space in enumerate(room)))
    y = 30 + (0.64 * svg.LETTER * max(map(len, columns)) if words else 12)
    marks = []
    for n, name in enumerate(columns):
        x = NAMES + (n + 0.5) * wide
        said = svg.turned(x, y, name) if words else svg.text(x, y, name, "small", "middle")
        marks.append(said)
    y += 8
    for name, squares in lines.items():
        label = wrapped(name)
        high = max(24.0, 13.0 * len(label) + 4)
        first = y + high / 2 + 4 - 6.5 * (len(label) - 1)
        marks.append(svg.group(colour(rows[name]), svg.dot(5, first - 4, "ink", 4)))
        marks += [
            svg.text(14, first + 13 * n, said, "small" if n else "") for n, said in enumerate(label)
        ]
        for n, square in enumerate(squares):
            if square is not None:
                marks += place(square, NAMES + n * wide, y, wide, high)
        y += high
    entries, y = svg.legend(y + 24, legend_of([rows[name] for name in lines]))
    told, y = svg.notes(y, *notes)
    return Picture(title, y + 8, (*marks, *entries, *told))


def place(square: Square, x: float, y: float, wide: float, high: float) -> list[str]:
    """One square and, where there is room, its number."""
    marks = [svg.group(square.colour, svg.box(x + 1, y + 1, wide - 2, high - 2, square.strength))]
    if wide > 5.8 * len(square.said):
        kind = "value unsure" if square.unsure else "value"
        marks.append(svg.text(x + wide / 2, y + high / 2 + 4, square.said, kind, "middle"))
    return marks


def wrapped(name: str) -> list[str]:
    """A row's name in lines that fit beside a heat map: the method, then its options."""
    room = NAMES - 4  # options are written smaller
    if "[" not in name:
        method, lossy, _ = name.partition(" (lossy)")
        whole = svg.cut(name, NAMES - 14) == name
        return [name] if whole or not lossy else [svg.cut(method, NAMES - 14), lossy.strip()]
    method, _, options = name.partition("[")
    lines = [svg.cut(method, room)]
    for option in f"[{options}".split(","):
        if len(lines) > 1 and svg.LETTER * (len(lines[-1]) + len(option) + 1) < room:
            lines[-1] += f",{option}"
        else:
            lines[-1] += "," if len(lines) > 1 else ""
            lines.append(option)
    return [lines[0], *(svg.cut(line, room) for line in lines[1:])]


def scoring_costs(scoring: Mapping[str, Any] | None) -> Picture | None:
    """What scoring n nodes costs, against scoring one."""
    if not scoring or len(scoring.get("nodes", [])) < 2:
        return None
    points = list(zip(scoring["nodes"], scoring["ratio"], strict=True))
    return curves(
        f"Cost of scoring n nodes at context {scoring['context']}",
        {"": points},
        "nodes scored in one target forward, the root included; cost in forwards of one node",
        values={n: f"{ms:.3g} ms" for n, ms in zip(scoring["nodes"], scoring["ms"], strict=True)},
    )


def curves(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    note: str,
    values: Mapping[float, str] | None = None,
    zero: bool = True,
) -> Picture:
    """Values over a count that doubles; each series in a colour of its own.

    `values` are written at their points; with `zero` the axis begins there.
    """
    points = [point for found in series.values() for point in found]
    first, last = math.log2(min(x for x, _ in points)), math.log2(max(x for x, _ in points))
    heights = [y for _, y in points]
    low = 0.0 if zero else min(heights) - 0.1 * (max(heights) - min(heights))
    high = max(heights) + 0.1 * (max(heights) - low)
    top, bottom = 30.0, 230.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - first) / (last - first or 1)
        return 36 + (WIDTH - 62) * across, bottom - (bottom - top) * (y - low) / (high - low)

    marks = []
    for tick in svg.steps_between(low, high):
        y = at(points[0][0], tick)[1]
        marks += [svg.line(28, y, WIDTH, y), svg.text(22, y + 4, f"{tick:g}", "small", "end")]
    if low < 1 < high:
        y = at(points[0][0], 1)[1]
        marks.append(svg.line(28, y, WIDTH, y, "one"))
    taken = 0.0
    for x in sorted({x for x, _ in points}):
        across = at(x, low)[0]
        if across > taken:  # a count beside another one's goes without its name
            marks.append(svg.text(across, bottom + 16, f"{x:g}", "small", "middle"))
            taken = across + 30
    colours = ("look-up", "draft-model", "self-speculation", "peers", "lossy", "baseline")
    entries = []
    for n, (name, found) in enumerate(series.items()):
        kind = colours[n % len(colours)]
        entries += [(kind, name)] if name else []
        marks.append(svg.curve([at(x, y) for x, y in found], kind))
    for x, y in points if values else ():
        across, down = at(x, y)
        marks.append(svg.text(across, down - 9, (values or {}).get(x, ""), "value", "middle"))
    legend, y = svg.legend(bottom + 38, entries)
    told, y = svg.notes(y, note)
    return Picture(title, y + 8, (*marks, *legend, *told))


def shares(rows: Rows) -> Picture | None:
    """Where each row's time goes: parts of a whole, so a bar is the right mark."""
    shown = {name: row["shares"] for name, row in rows.items() if row.get("shares")}
    if not shown:
        return None
    marks, y = [], 42.0
    for name, parts in shown.items():
        marks.append(svg.text(0, y, svg.cut(name, WIDTH)))
        x = 0.0
        for part, (_, kind) in PARTS.items():
            wide = WIDTH * parts[part]
            marks.append(svg.group(kind, svg.box(x, y + 5, wide - 1, 14)))
            if wide > 24:
                said = f"{100 * parts[part]:.0f}"
                marks.append(svg.text(x + wide / 2, y + 16, said, "on", "middle"))
            x += wide
        y += 40
    entries, y = svg.legend(y + 2, [(kind, said) for said, kind in PARTS.values()])
    notes, y = svg.notes(y, "% of wall time; hf rows count their prompt under target forwards")
    return Picture("Where the time goes", y + 8, (*marks, *entries, *notes))
