"""One self-contained page: inline style, pictures inside, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from foretoken.bench import words
from foretoken.bench.catalogue import group
from foretoken.bench.svg import COLOURS, MARKS, Picture

CAPTIONS = {
    "speedup": "The answer. The dashed line is plain decoding; a dot left of it costs time.",
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
     "interval over prompts, resampled in pairs; not distinguishable: it holds 1."),
    ("beams", "rows that write several scored texts are counted by the tokens of the best text, "
     "over the seconds that all texts took, and compared with beam sampling of the same width."),
    ("accepted length", "emitted tokens per target forward. 1 is plain decoding."),
    ("conversion", "speed-up over plain divided by accepted length: the part of the guessing that "
     "became speed."),
    ("efficiency", "measured speed-up of decoding over the one that accepted length and the "
     "measured costs of drafting and scoring allow. What is missing to 1 is the loop."),
    ("overhead", "milliseconds per step, which texts written at once share, outside drafting and "
     "target forwards."),
    ("forward/limit", "time per target forward, all that lies between two of them included, over "
     "the memory limit: the time in which the weights can be read once. A row that cannot tell its "
     "prompt's forward has it in there."),
    ("speed/limit", "tokens per second over those of the memory limit at one token a forward; "
     "above 1 only guessing can reach."),
    ("text as plain", "prompts whose tokens are exactly those of plain decoding (temperature 0)."),
    ("best score", "of beams: mean log-likelihood of a token of the best text, under the target."),
    ("answers right", "share of checkable answers that are right."),
    ("peak", "largest resident memory of the whole process during the row's cells (on a GPU: "
     "allocated there). All models of the bench are loaded at once, so compare rows, not levels. "
     "llama:* and vllm:* run in processes of their own: theirs is shown."),
)  # fmt: skip

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
$colours$marks
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 36px 28px 64px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 38px 0 12px; }
.date { color: var(--faint); margin: 0 0 22px; overflow-wrap: anywhere; }
.warning { border-left: 4px solid var(--bad); background: var(--card); padding: 10px 16px;
  margin: 0 0 16px; border-radius: 4px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; }
.tile, .card, figure { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
.tile { padding: 14px 18px; }
.tile b { display: block; font-size: 26px; line-height: 1.25; color: var(--look-up);
  font-variant-numeric: tabular-nums; }
.tile b.bad { color: var(--bad); }
.tile span { color: var(--faint); font-size: 13px; overflow-wrap: anywhere; }
.card { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--faint); font-size: 12px;
  padding: 11px 7px; border-bottom: 2px solid var(--line); vertical-align: bottom;
  line-height: 1.3; }
td { text-align: right; padding: 9px 7px; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; padding-left: 18px; }
td:first-child { font-weight: 600; white-space: normal; overflow-wrap: anywhere;
  min-width: 200px; }
td small { display: block; color: var(--faint); font-size: 11.5px; font-weight: 400; }
td.why { white-space: normal; text-align: left; color: var(--bad); }
tr.best { background: var(--best); }
.mark { display: inline-block; width: 9px; height: 9px; margin-right: 7px; border-radius: 50%;
  background: currentColor; }
.tag { display: inline-block; margin-left: 7px; padding: 0 7px; border-radius: 8px;
  font-size: 11px; font-weight: 600; color: var(--card); background: var(--bad); }
.good { color: var(--good); } .bad { color: var(--bad); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 16px;
  align-items: start; }
figure { margin: 0; padding: 16px 18px 12px; }
figure svg { width: 100%; max-width: 620px; height: auto; display: block; margin: 0 auto; }
figcaption { color: var(--faint); font-size: 13px; margin-top: 8px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 7px 18px; margin: 0;
  padding: 16px 20px; font-size: 14px; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 16px; }
@media (max-width: 760px) {
  main { padding: 20px 10px 40px; }
  .plots, .two { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  figure { padding: 12px 10px; }
  dl { grid-template-columns: 1fr; gap: 0; padding: 12px 14px; }
  dd { margin-bottom: 8px; }
  thead { display: none; }
  tr { display: grid; grid-template-columns: repeat(3, 1fr); padding: 10px 12px;
    border-bottom: 1px solid var(--line); }
  td { display: block; text-align: left; padding: 3px 6px 3px 0; border: 0; white-space: normal; }
  td:first-child, td.why { grid-column: 1 / -1; padding-left: 0; }
  td[data-name]::before { content: attr(data-name); display: block; color: var(--faint);
    font-size: 11px; }
  td.none { display: none; }
}
</style></head><body><main>
<h1>$title</h1>
<p class="date">$subtitle</p>
$warnings
<div class="tiles">$tiles</div>
<h2>Speed</h2>
<div class="plots">$speed</div>
<h2>Every row</h2>
<div class="card"><table><thead><tr>$head</tr></thead><tbody>$body</tbody></table></div>
$bounds
<h2>Why</h2>
<div class="plots">$plots</div>
<div class="two">
<section><h2>How to read this</h2><div class="card"><dl>$guide</dl></div></section>
<section><h2>Measured on</h2><div class="card"><dl>$facts</dl></div></section>
</div>
</main></body></html>
""")
SPEED = ("speedup", "families")  # pictures that come before the table


def html(results: Mapping[str, Any], pictures: Mapping[str, Picture]) -> str:
    """The page as text."""
    facts = words.facts(results)
    names = " with ".join(escape(str(n)) for n in results["setting"]["models"].values() if n)
    columns, table = words.table(results)
    drawn = {name: figure(name, picture) for name, picture in pictures.items()}
    return PAGE.substitute(
        title=escape(results["title"]),
        colours=COLOURS,
        marks=MARKS,
        subtitle=f"{names} \u00b7 {escape(facts['numbers'])} \u00b7 {escape(facts['date'])}",
        warnings="".join(
            f'<p class="warning"><b>Warning:</b> {escape(text)}.</p>'
            for text in results.get("warnings", [])
        ),
        tiles="".join(tiles(results)),
        speed="".join(drawn[name] for name in drawn if name in SPEED),
        head="".join(f"<th>{escape(column)}</th>" for column in columns),
        body="".join(table_row(label, columns, table[label], results) for label in table),
        bounds=bounds(results.get("gates", [])),
        plots="".join(drawn[name] for name in drawn if name not in SPEED),
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
            found.append(ratio_tile(over, f"plain's speed: {ours}, our fastest row"))
        if peer is not None:
            over = words.over_peer(results)
            found.append(ratio_tile(over, f"the fastest peer's speed ({peer})"))
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


def ratio_tile(over: Mapping[str, Any], text: str) -> str:
    """A speed-up, and whether it can be told from none."""
    unsure = f"; {words.SAME}" if words.same(over) else ""
    return tile(f"{over['value']:.2f}{words.TIMES}", f"{text}{unsure}")


def table_row(
    label: str, columns: Sequence[str], cells: Mapping[str, str], results: Mapping[str, Any]
) -> str:
    """One row: its group's colour, a tag if it is lossy, the reason if it failed."""
    row = results["rows"][label]
    kind = ' class="best"' if label in results["best"].values() else ""
    own = group(row["method"])
    name = f'<i class="mark {own.replace(" ", "-")}" title="{own}"></i>{breaking(label)}'
    if row["lossless"] is False:
        name += '<span class="tag">lossy</span>'
    if row["failed"]:
        name += '<span class="tag">failed</span>'
    if note := results.get("notes", {}).get(label):
        name += f"<small>{escape(note)}</small>"
    tds = [f"<td>{name}</td>"]
    if row["failed"]:
        why = escape(str(row["failed"]))
        if "tokens_per_second" not in row:
            wide = len(columns) - 1
            return f'<tr{kind}>{tds[0]}<td class="why" colspan="{wide}">{why}</td></tr>'
        tds[0] = f'<td>{name}<small class="bad">{why}</small></td>'
    for column in columns[1:]:
        said = cells[column]
        value, *rest = escape(said).split(" [", 1)  # the interval goes below its value
        shown = value + "".join(f"<small>[{part}</small>" for part in rest)
        shown = shown.replace(f"] {words.SAME}</small>", f"]<br>{words.SAME}</small>")
        if column == "text as plain" and row["text"]:
            good = row["text"]["equal"] == row["text"]["of"]
            shown = f'<span class="{"good" if good else "bad"}">{shown}</span>'
        none = ' class="none"' if said == words.MISSING else ""
        tds.append(f'<td{none} data-name="{escape(column)}">{shown}</td>')
    return f"<tr{kind}>{''.join(tds)}</tr>"


def breaking(label: str) -> str:
    """A row's name that may be broken between its options."""
    return escape(label).replace("[", "<wbr>[").replace(",", ",<wbr>")


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


def figure(name: str, picture: Picture) -> str:
    """A picture inside the page."""
    caption = escape(CAPTIONS.get(name, ""))
    return f"<figure>{picture.inline()}<figcaption>{caption}</figcaption></figure>"
