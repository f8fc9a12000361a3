"""Marks of a picture as SVG text, in colours that follow the reader's light or dark theme.

Pictures are narrow (WIDTH units), so that on a telephone their letters stay as large as the page's.
Colours are names (`class="ink draft-model"`); what they are, the style sheet alone says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

WIDTH = 440.0
LETTER = 6.3  # width of a letter of 12 units, on average

COLOURS = """
:root { --ink: #1f2933; --faint: #5f6b78; --line: #e1e5ea; --page: #f5f7f9; --card: #ffffff;
  --baseline: #5f6b78; --look-up: #0b6e99; --draft-model: #c46a14; --self-speculation: #2f7d4f;
  --lossy: #b83b4b; --peers: #7a5ba8; --faster: #2b8a9e; --slower: #c9562f; --bad: #b83b4b;
  --good: #2f7d4f; --best: #eef6fa; }
@media (prefers-color-scheme: dark) {
:root { --ink: #e4e9ee; --faint: #9aa7b4; --line: #323b45; --page: #12161b; --card: #1b2128;
  --baseline: #9aa7b4; --look-up: #5bb4dc; --draft-model: #f0a04b; --self-speculation: #6cc48e;
  --lossy: #f0808c; --peers: #b99be6; --faster: #3fb0c6; --slower: #e8784f; --bad: #f0808c;
  --good: #6cc48e; --best: #1c2a35; }
}
"""
MARKS = """
.plot { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
.plot text { fill: var(--ink); }
.plot .title { font-size: 15px; font-weight: 600; }
.plot .small { font-size: 11px; fill: var(--faint); }
.plot .halo { paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
.plot .number { font-variant-numeric: tabular-nums; }
.plot .on { font-size: 10px; fill: var(--card); }
.plot .value { font-size: 10.5px; }
.plot .unsure { fill: var(--faint); font-style: italic; }
.plot .ink { fill: currentColor; stroke: currentColor; }
.plot .hollow { fill: var(--card); stroke: currentColor; stroke-width: 2; }
.plot .grid { stroke: var(--line); stroke-width: 1; }
.plot .one { stroke: var(--faint); stroke-dasharray: 4 3; }
.plot .curve { fill: none; stroke: currentColor; stroke-width: 2; }
.plot .paper { fill: var(--card); }
""" + "".join(
    f".{name} {{ color: var(--{name}); }}\n"
    for name in (
        "baseline", "look-up", "draft-model", "self-speculation", "lossy", "peers", "faster",
        "slower", "faint",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing: its title, its height and its marks."""

    title: str
    height: float
    marks: tuple[str, ...]

    def inline(self) -> str:
        """For a page that brings COLOURS and MARKS itself."""
        return self.drawn(f'viewBox="0 0 {WIDTH:g} {self.height:g}"')

    def drawn(self, attributes: str, *before: str) -> str:
        """The element, with `before` under the marks."""
        name = escape(self.title)
        body = "\n".join((*before, text(0, 15, self.title, "title"), *self.marks))
        return f'<svg class="plot" {attributes} role="img" aria-label="{name}">{body}</svg>'


def standalone(picture: Picture) -> str:
    """A file of its own: with its style and its paper."""
    wide, high = WIDTH + 24, picture.height + 16
    place = f'viewBox="-12 -8 {wide:g} {high:g}" width="{wide:g}" height="{high:g}"'
    paper = f'<rect class="paper" x="-12" y="-8" width="{wide:g}" height="{high:g}"/>'
    style = f"<style>{COLOURS}{MARKS}</style>"
    return picture.drawn(f'xmlns="http://www.w3.org/2000/svg" {place}', style, paper) + "\n"


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    """Words with their base line at y."""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{place}>{escape(said)}</text>'


def turned(x: float, y: float, said: str, kind: str = "small") -> str:
    """Words that rise to the right from (x, y)."""
    return (
        f'<text class="{kind}" transform="translate({x:.1f} {y:.1f}) rotate(-40)">'
        f"{escape(said)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid", width: float = 1) -> str:
    return (
        f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke-width="{width:g}"/>'
    )


def dot(x: float, y: float, kind: str = "ink", size: float = 4.5) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size:g}"/>'


def box(x: float, y: float, width: float, height: float, strength: float = 1.0) -> str:
    """A filled rectangle; `strength` below 1 lets the paper through."""
    return (
        f'<rect fill="currentColor" fill-opacity="{strength:.2f}" x="{x:.1f}" '
        f'y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="2"/>'
    )


def curve(points: Sequence[tuple[float, float]], kind: str) -> str:
    """A line through points, with a dot at each."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(dot(x, y, size=3) for x, y in points)
    return f'<g class="{kind}"><polyline class="curve" points="{path}"/>{dots}</g>'


def bar(start: float, stop: float, y: float) -> str:
    """An interval."""
    return line(start, y, stop, y, "ink", 2.5)


def group(colour: str, *marks: str) -> str:
    """Marks in one colour."""
    return f'<g class="{colour}">{"".join(marks)}</g>'


def legend(y: float, entries: Sequence[tuple[str, str]]) -> tuple[list[str], float]:
    """Dots with their names (colour, words) in as many lines as they need; the last line's y."""
    marks, x = [], 0.0
    for colour, said in entries:
        wide = 26 + 0.92 * LETTER * len(said)
        if x > 0 and x + wide > WIDTH:
            x, y = 0.0, y + 18
        marks += [group(colour, dot(x + 5, y - 4)), text(x + 14, y, said, "small")]
        x += wide
    return marks, y if entries else y - 18


def notes(y: float, *said: str) -> tuple[list[str], float]:
    """Small lines below `y`, broken where they would leave the picture; the last one's y."""
    lines = [line for one in said for line in wrap(one, int(WIDTH / (0.92 * LETTER)) - 4)]
    return [text(0, y + 18 * n, line, "small") for n, line in enumerate(lines, 1)], y + 18 * len(
        lines
    )


def cut(said: str, room: float) -> str:
    """Words that fit into `room` units."""
    most = max(int(room / LETTER), 4)
    return said if len(said) <= most else said[: most - 1] + "\u2026"


def steps_between(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` of them."""
    for scale in (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0):
        for unit in (1.0, 2.0, 2.5, 5.0):
            size = scale * unit
            first, last = -int(-low // size), int(high // size)
            if last - first < most:
                return [n * size for n in range(first, last + 1)]
    return [low, high]
