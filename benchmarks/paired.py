"""One thing above another, prompt by prompt: differences with intervals, and their table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gates
from pair import console

from foretoken.bench.intervals import interval

Gap = Callable[[Sequence[int]], float]  # the difference over prompts, by their numbers

NOTE = (
    "Differences with their 95 % intervals over prompts. An ordering holds unless its whole "
    "interval is below zero, and is clear if its whole interval is above. The last column names "
    "the prompt families in which it fails by that measure."
)


def ordering(claim: str, gap: Gap, families: Sequence[str]) -> dict[str, Any]:
    """The difference over all prompts and by family; `families[i]` is that of prompt i."""
    by_family = {
        family: difference(gap, [i for i, own in enumerate(families) if own == family])
        for family in dict.fromkeys(families)
    }
    lost = [family for family, one in by_family.items() if not one["holds"]]
    whole = difference(gap, range(len(families)))
    return {"claim": claim, **whole, "by_family": by_family, "fails_in": lost}


def difference(gap: Gap, prompts: Sequence[int]) -> dict[str, Any]:
    """The difference over some prompts; it fails if its whole interval is below zero."""
    value = gap(prompts)
    span = interval(lambda at: gap([prompts[i] for i in at]), len(prompts))
    low, high = span or (None, None)
    return {
        "difference": value,
        "interval": [low, high],  # none of fewer than three prompts
        "holds": (value if high is None else high) >= 0.0,
        "clear": low is not None and low > 0.0,
    }


def verdict(one: Mapping[str, Any]) -> str:
    return "clear" if one["clear"] else "holds" if one["holds"] else "fails"


def table(compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    lines = [
        "## Orderings", "", NOTE, "",
        "| ordering | difference | interval | verdict | fails in |", "|---|---:|---|---|---|",
    ]  # fmt: skip
    for one in compared:
        low, high = one["interval"]
        span = "-" if low is None else f"{low:+.4f} to {high:+.4f}"
        lines.append(
            f"| {one['claim']} | {one['difference']:+.4f} | {span} "
            f"| {verdict(one)} | {', '.join(one['fails_in']) or '-'} |"
        )
    return lines


def publish(out: Path, name: str, document: Mapping[str, Any], text: str) -> None:
    """Write a result with orderings, and say them on the terminal."""
    files = gates.publish(out, name, document, text)
    for one in document["orderings"]:
        line = f"{verdict(one):6} {one['difference']:+.4f}  {one['claim']}"
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"wrote {', '.join(str(file) for file in files)}", markup=False)
