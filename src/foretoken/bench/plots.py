"""Pictures of a bench: PNG files with titles, units and legends.

Ours are drawn in colour, peers in greys, so that a reader sees at once whose bar is whose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.bench.words import TIMES, titled
from foretoken.errors import ConfigError

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as problem:
    raise ConfigError(
        "a bench was asked for.",
        "its plots need matplotlib, which is not installed.",
        "pip install 'foretoken[bench]'.",
    ) from problem

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
OURS = ("#0b6e99", "#d9822b", "#3f8f5b", "#9b59a6", "#b83b4b", "#5c6bc0", "#8d6e3f", "#2aa198")
PEERS = ("#c3cad2", "#a3adb8", "#86919e", "#6b7785")
SHARES = {"prompt": "#b9c6d2", "draft": "#d9822b", "target": "#0b6e99", "other": "#b83b4b"}
SHARE_NAMES = {
    "prompt": "prompt",
    "draft": "drafting",
    "target": "target forwards",
    "other": "everything else",
}
LINE = 0.19  # inches of a legend's line
Rows = Mapping[str, Mapping[str, Any]]


def draw(results: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Every picture there are numbers for; name -> file."""
    named = {titled(label, row): row for label, row in results["rows"].items()}
    rows = {name: row for name, row in named.items() if "tokens_per_second" in row}
    colours = colours_of(named)
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "speedup": speedup_bars(rows, colours),
        "families": family_bars(rows, colours, results["best"]["peer"]),
        "acceptance": acceptance_lines(rows, colours),
        "steps": step_bars(rows, colours),
        "scoring": scoring_line(results.get("scoring")),
        "shares": share_bars(rows),
    }
    paths = {}
    for name, figure in made.items():
        if figure is not None:
            paths[name] = folder / f"{name}.png"
            figure.savefig(paths[name], dpi=144, facecolor="white")
    return paths


def colours_of(rows: Rows) -> dict[str, str]:
    """The same colour for a row in every picture."""
    colours, ours, peers = {}, 0, 0
    for name, row in rows.items():
        if row["peer"]:
            colours[name], peers = PEERS[peers % len(PEERS)], peers + 1
        elif name == "plain":
            colours[name] = FAINT
        else:
            colours[name], ours = OURS[ours % len(OURS)], ours + 1
    return colours


def canvas(title: str, width: float = 7.2, height: float = 4.2) -> tuple[Figure, Axes]:
    """A figure in the house's clothes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)
    return figure, axes


def speedup_bars(rows: Rows, colours: Mapping[str, str]) -> Figure | None:
    """Speed-up over plain, with intervals."""
    reference = next((r for r in ("plain", "hf:plain", "hf:compiled") if r in rows), None)
    shown = {
        name: row["speedup"][reference]
        for name, row in rows.items()
        if reference is not None and row["speedup"].get(reference)
    }
    if not shown:
        return None
    title = f"Speed-up over {reference}"
    figure, axes = canvas(title, height=max(2.6, 0.42 * len(shown) + 1.5))
    names = list(shown)[::-1]
    values = [shown[name]["value"] for name in names]
    axes.barh(names, values, color=[colours[name] for name in names], height=0.66)
    for y, (name, value) in enumerate(zip(names, values, strict=True)):
        low, high = shown[name]["interval"] or (value, value)
        axes.plot([low, high], [y, y], color=INK, linewidth=1.4, solid_capstyle="butt")
        axes.text(max(high, value), y, f"  {value:.2f}{TIMES}", va="center", fontsize=9, color=INK)
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0.5)
    axes.set_xlim(
        0, 1.14 * max(max(s["value"], (s["interval"] or (0, 0))[1]) for s in shown.values())
    )
    axes.set_xlabel(
        f"times {reference}'s tokens per second (line: 95 % interval over prompts)",
        loc="right",
        color=INK,
        fontsize=9,
    )
    axes.grid(axis="x", color=GRID)
    return figure


def family_bars(rows: Rows, colours: Mapping[str, str], best_peer: str | None) -> Figure | None:
    """Speed-up over plain, family by family: our rows and the best peer."""
    chosen = {
        name: row
        for name, row in rows.items()
        if name != "plain" and (not row["peer"] or name == best_peer) and "plain" in row["speedup"]
    }
    families = list(dict.fromkeys(f for row in chosen.values() for f in row["families"]))
    if not chosen or not families:
        return None
    wide = max(7.2, (0.9 + 0.05 * len(chosen)) * len(families))
    figure, axes = canvas("Speed-up over plain by task family", width=wide)
    width = 0.8 / len(chosen)
    for n, (name, row) in enumerate(chosen.items()):
        heights = [
            ((row["families"].get(family) or {}).get("speedup") or {}).get("value", 0.0)
            for family in families
        ]
        at = [x + (n - (len(chosen) - 1) / 2) * width for x in range(len(families))]
        axes.bar(at, heights, width * 0.92, color=colours[name], label=name)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(families)), [family.replace(" ", "\n") for family in families])
    axes.set_ylabel("times plain's tokens per second", color=INK, fontsize=9)
    axes.grid(axis="y", color=GRID)
    legend_outside(figure, axes, len(chosen))
    return figure


def acceptance_lines(rows: Rows, colours: Mapping[str, str]) -> Figure | None:
    """How far guesses stand: conditional acceptance at each depth."""
    shown = {
        name: row["acceptance"]["conditional"]
        for name, row in rows.items()
        if row.get("acceptance", {}).get("conditional")
    }
    if not shown:
        return None
    figure, axes = canvas("Acceptance by depth")
    for name, values in shown.items():
        depths = range(1, len(values) + 1)
        axes.plot(depths, values, marker="o", markersize=4, color=colours[name], label=name)
    axes.set_ylim(0, 1.03)
    deepest = max(len(values) for values in shown.values())
    axes.set_xticks(range(1, deepest + 1, max(1, deepest // 12)))
    axes.set_xlabel("depth of the guess (tokens below the last committed one)", fontsize=9)
    axes.set_ylabel("share accepted, all above it accepted", fontsize=9)
    axes.grid(color=GRID)
    legend_outside(figure, axes, len(shown))
    return figure


def step_bars(rows: Rows, colours: Mapping[str, str]) -> Figure | None:
    """How many tokens a target forward gives: the whole distribution behind the mean."""
    shown = {
        name: row["histogram"]["emitted_per_step"]
        for name, row in rows.items()
        if name != "plain" and row["histogram"]["emitted_per_step"]
    }
    if not shown:
        return None
    longest = max(int(n) for counts in shown.values() for n in counts)
    figure, axes = canvas(
        "Tokens written per target forward", width=max(7.2, 0.04 * longest * len(shown))
    )
    width = 0.8 / len(shown)
    for k, (name, counts) in enumerate(shown.items()):
        total = sum(counts.values())
        at = [n + (k - (len(shown) - 1) / 2) * width for n in range(1, longest + 1)]
        heights = [counts.get(str(n), 0) / total for n in range(1, longest + 1)]
        mean = rows[name]["accepted_length"]["emitted_per_forward"]
        axes.bar(at, heights, width * 0.92, color=colours[name], label=f"{name} (mean {mean:.2f})")
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlabel(
        "tokens per forward (accepted guesses and the one token that is free)", fontsize=9
    )
    axes.set_ylabel("share of forwards", fontsize=9)
    axes.grid(axis="y", color=GRID)
    legend_outside(figure, axes, len(shown))
    return figure


def scoring_line(scoring: Mapping[str, Any] | None) -> Figure | None:
    """What scoring n nodes costs, against scoring one."""
    if not scoring or len(scoring.get("nodes", [])) < 2:
        return None
    figure, axes = canvas(f"Cost of scoring n nodes at context {scoring['context']}")
    nodes, ratio = scoring["nodes"], scoring["ratio"]
    axes.plot(nodes, ratio, marker="o", color=OURS[0], label="measured")
    axes.axhline(1.0, color=FAINT, linestyle=(0, (4, 3)), linewidth=1, label="free: as one node")
    for n, times, ms in zip(nodes, ratio, scoring["ms"], strict=True):
        axes.annotate(
            f"{ms:.3g} ms", (n, times), (0, 7), textcoords="offset points", fontsize=8, ha="center"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(n) for n in nodes])
    axes.set_ylim(0, 1.15 * max(ratio))
    axes.set_xlabel("nodes scored in one target forward, the root included", fontsize=9)
    axes.set_ylabel("cost in forwards of one node", fontsize=9)
    axes.grid(color=GRID)
    legend_outside(figure, axes, 2)
    return figure


def share_bars(rows: Rows) -> Figure | None:
    """Where each row's time goes."""
    shown = {name: row["shares"] for name, row in rows.items() if row.get("shares")}
    if not shown:
        return None
    names = list(shown)[::-1]
    figure, axes = canvas("Where the time goes", height=max(2.8, 0.42 * len(shown) + 1.7))
    left = [0.0] * len(names)
    for part, colour in SHARES.items():
        values = [100 * shown[name][part] for name in names]
        axes.barh(names, values, left=left, color=colour, height=0.66, label=SHARE_NAMES[part])
        for y, (start, value) in enumerate(zip(left, values, strict=True)):
            if value >= 6:
                text = "white" if part != "prompt" else INK
                axes.text(
                    start + value / 2, y, f"{value:.0f}", ha="center", va="center",
                    fontsize=8, color=text,
                )  # fmt: skip
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of wall time (hf rows count their prompt under target forwards)", fontsize=9)
    legend_outside(figure, axes, len(SHARES))
    return figure


def legend_outside(figure: Figure, axes: Axes, entries: int) -> None:
    """A legend below the picture, where it hides nothing; the figure grows by its lines."""
    handles, labels = axes.get_legend_handles_labels()
    widest = max((len(label) for label in labels), default=1)
    width, height = figure.get_size_inches()
    columns: int = max(1, min(entries, int(11.6 * width) // (widest + 6)))
    figure.set_size_inches(width, height + LINE * max(0, math.ceil(entries / columns) - 2))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
