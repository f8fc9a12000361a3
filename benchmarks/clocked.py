"""Speeds of rows by all their tokens over all their seconds, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.bench.intervals import interval
from foretoken.bench.journal import Cell, read_journal

Work = tuple[int, float, int]  # tokens, seconds, target forwards


class Clock:
    """Finished cells, added up by row and prompt."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self.work: dict[str, dict[str, Work]] = {}
        for cell in cells:
            row = self.work.setdefault(cell.row, {})
            tokens, seconds, forwards = row.get(cell.prompt, (0, 0.0, 0))
            row[cell.prompt] = (
                tokens + len(cell.tokens),
                seconds + cell.seconds,
                forwards + (cell.forwards or len(cell.steps)),
            )

    @classmethod
    def of(cls, folder: Path) -> Clock:
        """Of a bench's own folder."""
        return cls(read_journal(folder / "journal.jsonl")[1].cells)

    def over(self, above: str | None, below: str | None, by: str = "seconds") -> dict[str, Any]:
        """How many times the tokens per second (or per target forward) of another row a row has,
        on the prompts that both wrote; None where one wrote nothing.
        """
        rows = [self.work.get(label or "", {}) for label in (above, below)]
        prompts = [prompt for prompt in rows[0] if prompt in rows[1]]
        if not prompts:
            return {"value": None, "interval": None}
        at = 1 if by == "seconds" else 2

        def ratio(chosen: Sequence[int]) -> float:
            high, low = (
                sum(row[prompts[i]][0] for i in chosen) / sum(row[prompts[i]][at] for i in chosen)
                for row in rows
            )
            return float(high / low)

        return {"value": ratio(range(len(prompts))), "interval": interval(ratio, len(prompts))}

    def best(self, start: str) -> str | None:
        """The fastest row whose label begins so, of those that wrote the most prompts."""
        found = [label for label in self.work if label.startswith(start)]
        most = max((len(self.work[label]) for label in found), default=0)
        whole = [label for label in found if len(self.work[label]) == most]
        return max(whole, key=self.rate, default=None)

    def rate(self, label: str) -> float:
        """Tokens per second."""
        tokens, seconds, _ = (sum(parts) for parts in zip(*self.work[label].values(), strict=True))
        return tokens / seconds

    def length(self, label: str) -> float:
        """Tokens per target forward."""
        tokens, _, steps = (sum(parts) for parts in zip(*self.work[label].values(), strict=True))
        return tokens / steps

    def table(self, against: Mapping[str, str | None], base: str = "plain") -> str:
        """Every row's speed over `base` and over the row it is fairly held against."""
        lines = [
            f"| row | prompts | tokens/s | tokens per step | over {base} | over | times as fast |",
            "|---|---:|---:|---:|---|---|---|",
        ]
        for label in self.work:
            other = against.get(label)
            cells = [label, str(len(self.work[label]))]
            cells += [f"{self.rate(label):.1f}", f"{self.length(label):.2f}"]
            cells += [spanned(self.over(label, base)), other or "-"]
            cells += [spanned(self.over(label, other)) if other else "-"]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"


def spanned(one: Mapping[str, Any]) -> str:
    """A value and its 95 % interval."""
    if one["value"] is None:
        return "not measured"
    span = one["interval"]
    return f"{one['value']:.2f}" + (f" ({span[0]:.2f} to {span[1]:.2f})" if span else "")
