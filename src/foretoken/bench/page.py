"""One self-contained page: inline style, pictures inside, nothing fetched."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from foretoken.bench import words

CAPTIONS = {
    "speedup": "The answer. The dashed line is plain decoding; a bar left of it costs time.",
    "families": "One number hides the spread: what pays on one kind of prompt may not on another.",
    "acceptance": "How well guesses hold, the deeper they go.",
    "steps": "What one target forward brings. The mean of this is the accepted length.",
    "scoring": "Guessing pays while scoring many nodes costs little more than scoring one.",
    "shares": "Only drafting and target forwards should be felt.",
}

GUIDE = (
    ("tokens/s", "new tokens over wall time from prompt ids to the last new id, the prompt's own "
     "forward included: median over prompts of each prompt's median over repetitions."),
    ("over …", "ratio of two rows' medians over the same prompts; in brackets the 95 % bootstrap "
     "interval over prompts, resampled in pairs."),
    ("accepted length", "emitted tokens per target forward. 1 is plain decoding."),
    ("conversion", "speed-up over plain divided by accepted length: the part of the guessing that "
     "became speed."),
    ("efficiency", "measured speed-up of decoding over the one that accepted length and the "
     "measured costs of drafting and scoring allow. What is missing to 1 is the loop."),
    ("overhead", "milliseconds per step outside drafting and target forwards."),
    ("text as plain", "prompts whose tokens are exactly those of plain decoding (temperature 0)."),
    ("answers right", "share of checkable answers that are right."),
    ("peak", "largest resident memory of the whole process during the row's cells (on a GPU: "
     "allocated there). All models of the bench are loaded at once, so compare rows, not levels."),
)  # fmt: skip

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { --ink: #1f2933; --faint: #66727f; --line: #e4e7eb; --ours: #0b6e99; --bad: #b83b4b; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: var(--ink);
  font: 15px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 36px 28px 64px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 38px 0 12px; }
.date { color: var(--faint); margin: 0 0 22px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; }
.tile, .card { background: white; border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 14px 18px; }
.tile b { display: block; font-size: 26px; line-height: 1.25; color: var(--ours);
  font-variant-numeric: tabular-nums; }
.tile b.bad { color: var(--bad); }
.tile span { color: var(--faint); font-size: 13px; }
.card { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--faint); font-size: 12px;
  padding: 11px 9px; border-bottom: 2px solid var(--line); vertical-align: bottom;
  line-height: 1.3; }
td { text-align: right; padding: 9px; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; padding-left: 18px; }
th:last-child, td:last-child { padding-right: 18px; }
td:first-child small { white-space: normal; max-width: 230px; }
td:first-child { font-weight: 600; }
td small { display: block; color: var(--faint); font-size: 11.5px; font-weight: 400; }
td.note, td.why { white-space: normal; text-align: left; }
td.why { color: var(--bad); }
tr.peer td:first-child { font-weight: 400; }
tr.best { background: #eef6fa; }
.track { height: 5px; margin-top: 5px; background: var(--line); border-radius: 3px;
  min-width: 92px; }
.track i { display: block; height: 5px; border-radius: 3px; background: #9aa5b1; }
tr.ours .track i { background: var(--ours); }
.tag { display: inline-block; margin-left: 7px; padding: 0 7px; border-radius: 8px;
  font-size: 11px; font-weight: 600; color: white; background: var(--bad); }
.good { color: #2f7d4f; } .bad { color: var(--bad); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 16px; }
figure { margin: 0; padding: 14px 16px 12px; background: white; border: 1px solid var(--line);
  border-radius: 10px; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--faint); font-size: 13px; margin-top: 8px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 7px 18px; margin: 0;
  padding: 16px 20px; font-size: 14px; }
dt { color: var(--faint); } dd { margin: 0; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 16px; }
@media (max-width: 620px) {
  .plots, .two { grid-template-columns: 1fr; }
  main { padding: 20px 12px; }
}
</style></head><body><main>
<h1>$title</h1>
<p class="date">$subtitle</p>
<div class="tiles">$tiles</div>
<h2>Every row</h2>
<div class="card"><table><thead><tr>$head</tr></thead><tbody>$body</tbody></table></div>
$bounds
<h2>Pictures</h2>
<div class="plots">$plots</div>
<div class="two">
<section><h2>How to read this</h2><div class="card"><dl>$guide</dl></div></section>
<section><h2>Measured on</h2><div class="card"><dl>$facts</dl></div></section>
</div>
</main></body></html>
""")


def html(results: Mapping[str, Any], pictures: Mapping[str, Path]) -> str:
    """The page as text."""
    facts = words.facts(results)
    setting = results["setting"]
    names = " with ".join(escape(str(n)) for n in setting["models"].values() if n)
    return PAGE.substitute(
        title=escape(results["title"]),
        subtitle=f"{names} · {escape(facts['numbers'])} · {escape(facts['date'])}",
        tiles="".join(tiles(results)),
        head="".join(f"<th>{escape(column)}</th>" for column in words.COLUMNS),
        body="".join(table_row(label, row, results) for label, row in results["rows"].items()),
        bounds=bounds(results.get("gates", [])),
        plots="".join(figure(name, path) for name, path in pictures.items()),
        guide="".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in GUIDE),
        facts="".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()),
    )


def tiles(results: Mapping[str, Any]) -> list[str]:
    """The four numbers a reader came for."""
    rows, best = results["rows"], results["best"]
    ours, peer = best["ours"], best["peer"]
    found = []
    if ours is not None:
        row = rows[ours]
        over = row["speedup"].get("plain")
        if over:
            found.append(
                tile(f"{over['value']:.2f}{words.TIMES}", f"plain's speed: {ours}, our fastest row")
            )
        if peer is not None:
            ratio = row["tokens_per_second"]["value"] / rows[peer]["tokens_per_second"]["value"]
            found.append(tile(f"{ratio:.2f}{words.TIMES}", f"the fastest peer's speed ({peer})"))
        if row["text"]:
            equal = row["text"]
            found.append(
                tile(f"{equal['equal']} of {equal['of']}", "prompts with plain's very text")
            )
        mean = row["accepted_length"]["emitted_per_forward"]
        if mean:
            found.append(tile(f"{mean:.2f}", "tokens per target forward"))
    failed = sum(1 for row in rows.values() if row["failed"])
    if failed:
        text = "row failed and says why" if failed == 1 else "rows failed and say why"
        found.append(tile(str(failed), f"{text} below", bad=True))
    return found


def tile(value: str, text: str, *, bad: bool = False) -> str:
    mark = ' class="bad"' if bad else ""
    return f'<div class="tile"><b{mark}>{escape(value)}</b><span>{escape(text)}</span></div>'


def table_row(label: str, row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """One row: a bar under its speed-up, a tag if it is lossy, the reason if it failed."""
    kind = "peer" if row["peer"] else "ours"
    if label in results["best"].values():
        kind += " best"
    note = results.get("notes", {}).get(label, "")
    name = escape(label) + ('<span class="tag">lossy</span>' if row["lossless"] is False else "")
    if row["failed"]:
        name += '<span class="tag">failed</span>'
    if note:
        name += f"<small>{escape(note)}</small>"
    if "tokens_per_second" not in row:
        why = escape(str(row["failed"]))
        wide = len(words.COLUMNS) - 1
        return f'<tr class="{kind}"><td>{name}</td><td class="why" colspan="{wide}">{why}</td></tr>'
    cells = words.cells_of(label, row)[1:]
    cells = [escape(cell) for cell in cells]
    for at in (1, 2, 3):  # the interval goes below its value
        cells[at] = cells[at].replace(" [", "<small>[", 1) + (
            "</small>" if " [" in cells[at] else ""
        )
    over = row["speedup"].get("plain") or row["speedup"].get("hf:plain")
    if over:
        cells[1] += bar(over["value"], results["rows"])
    if row["text"]:
        good = row["text"]["equal"] == row["text"]["of"]
        cells[8] = f'<span class="{"good" if good else "bad"}">{cells[8]}</span>'
    if row["failed"]:
        name += f'<small class="bad">{escape(str(row["failed"]))}</small>'
    tds = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr class="{kind}"><td>{name}</td>{tds}</tr>'


def bounds(gates: Sequence[Mapping[str, Any]]) -> str:
    """What was promised and what was measured, where a script judged it."""
    if not gates:
        return ""
    rows = ""
    for gate in gates:
        side = "at least" if gate["at_least"] else "at most"
        measured = gate["measured"]
        shown = "not measured" if measured is None else f"{measured:.2f}{gate['unit']}"
        verdict, mark = ("holds", "good") if gate["holds"] else ("fails", "bad")
        rows += (
            f"<tr><td>{escape(gate['claim'])}</td><td>{side} {gate['bound']:g}{gate['unit']}</td>"
            f'<td>{shown}</td><td><span class="{mark}">{verdict}</span></td></tr>'
        )
    head = "".join(f"<th>{name}</th>" for name in ("claim", "wanted", "measured", "verdict"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<h2>Bounds</h2><div class="card">{table}</div>'


def bar(value: float, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A small bar on the scale of the largest speed-up."""
    largest = max(
        (row["speedup"].get("plain") or row["speedup"].get("hf:plain") or {}).get("value", 0.0)
        for row in rows.values()
        if "tokens_per_second" in row
    )
    return f'<div class="track"><i style="width:{100 * value / largest:.1f}%"></i></div>'


def figure(name: str, path: Path) -> str:
    """A picture inside the page."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    caption = escape(CAPTIONS.get(name, ""))
    return (
        f'<figure><img alt="{escape(name)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
