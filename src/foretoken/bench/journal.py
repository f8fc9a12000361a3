"""Finished work on disk: one JSON line per cell, so that an interrupted bench loses nothing.

A cell is one text: (row, prompt, repetition). The journal starts with a header that says what was
asked; going on with other models, prompts or sampling would mix what cannot be compared.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretoken.bench import json_lines
from foretoken.bench.own import Outcome
from foretoken.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class Cell:
    """One text of one row."""

    row: str
    prompt: str
    family: str
    repetition: int
    prompt_tokens: int
    tokens: list[int]
    seconds: float
    prefill: float | None = None
    draft: float | None = None
    target: float | None = None
    steps: list[list[int]] = field(default_factory=list)  # drafted, depth, accepted, emitted
    forwards: int | None = None
    rounds: int | None = None  # the same, where those that texts share count once
    each: list[list[int]] = field(default_factory=list)  # tokens and forwards of each such text
    correct: bool | None = None  # None: nothing to check
    load: list[float] = field(default_factory=list)  # load average (1 min) before and after
    peak_rss: int | None = None  # bytes of the whole process, every model of the bench included
    rss_growth: int | None = None  # how far the peak rose above the level before the cell
    peak_cuda: int | None = None
    texts: int | None = None  # of beams, and the score of the best one
    score: float | None = None
    run: int = 0  # of the bench: resuming begins the next; journals of before tell none


@dataclass(slots=True)
class Journal:
    """The file of finished cells, and what it already holds."""

    path: Path
    cells: list[Cell] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # row -> why
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)  # kind -> key -> value
    finished: bool = False
    run: int = 0  # that cells are added by now

    def done(self) -> set[tuple[str, str, int]]:
        return {(cell.row, cell.prompt, cell.repetition) for cell in self.cells}

    def add(self, cell: Cell) -> None:
        self.finished = False  # it was, and has grown
        cell.run = self.run
        self.cells.append(cell)
        self._write({"kind": "cell", **asdict(cell)})

    def fail(self, row: str, why: str) -> None:
        self.failed[row] = why
        self._write({"kind": "failed", "row": row, "why": why})

    def begun(self, row: str, whole: int) -> bool:
        """Whether a repetition of a row has cells, but fewer than `whole`."""
        written = Counter(cell.repetition for cell in self.cells if cell.row == row)
        return any(count < whole for count in written.values())

    def same(self, row: str, contents: dict[str, str]) -> None:
        """ConfigError where a row's cells were written with other files, or by another engine."""
        known = self.notes.get("contents", {}).get(row, contents)
        if known != contents and any(cell.row == row for cell in self.cells):
            differ = [key for key in {**known, **contents} if known.get(key) != contents.get(key)]
            raise ConfigError(
                f"going on with the bench in {self.path.parent}.",
                f"the row {row} was begun with another {', '.join(differ)} than there is now.",
                "begin anew in another --out, or leave the row out.",
            )
        if contents:
            self.note("contents", row, contents)

    def note(self, kind: str, key: str, value: Any) -> None:
        """Something a later run must not find out anew: a turn's context, a peer's setting."""
        self.notes.setdefault(kind, {})[key] = value
        self._write({"kind": "note", "about": kind, "key": key, "value": value})

    def finish(self) -> None:
        self.finished = True
        self._write({"kind": "finished"})

    def _write(self, entry: dict[str, Any]) -> None:
        json_lines.append(self.path, entry, "cell")

    def take(self, kind: str, entry: dict[str, Any]) -> None:
        """Take in a line of the file."""
        if kind == "cell":
            self.cells.append(Cell(**entry))
            self.finished = False  # a bench that went on behind its end
        elif kind == "failed":
            self.failed[entry["row"]] = entry["why"]
        elif kind == "note":
            self.notes.setdefault(entry["about"], {})[entry["key"]] = entry["value"]
        else:
            self.finished = kind == "finished"


def open_journal(path: Path, asked: dict[str, Any], resume: bool) -> Journal:
    """A journal for `asked`: a new one, or with `resume` the one an interrupted run left."""
    if path.exists():
        old_asked, journal = read_journal(path)
        if resume:
            _check_same(asked, old_asked, path)
            journal.failed.clear()  # what failed is tried again; the cause may be gone
            journal.run = 1 + max((cell.run for cell in journal.cells), default=-1)
            return journal
        if journal.cells and not journal.finished:
            raise ConfigError(
                f"a new bench in {path.parent}.",
                f"an interrupted one left {len(journal.cells)} finished cells there.",
                "go on with --resume, or name another --out.",
            )
    json_lines.begin(path, asked)
    return Journal(path)


def read_journal(path: Path) -> tuple[dict[str, Any], Journal]:
    """What was asked and what was finished. A last line cut off by a kill is removed."""
    journal = Journal(path)
    return json_lines.read(path, journal.take, "cell"), journal


def _check_same(asked: dict[str, Any], old: dict[str, Any], path: Path) -> None:
    differ = [key for key in {**asked, **old} if asked.get(key) != old.get(key)]
    if differ:
        changes = "; ".join(f"{k}: {_short(old.get(k))} -> {_short(asked.get(k))}" for k in differ)
        raise ConfigError(
            f"going on with the bench in {path.parent}.",
            f"it was begun with other settings ({changes}).",
            "ask for the same again (methods and repetitions may grow), or name another --out.",
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def cell_of(
    outcome: Outcome,
    *,
    row: str,
    prompt: str,
    family: str,
    repetition: int,
    prompt_tokens: int,
    **measured: Any,
) -> Cell:
    """A cell from what a row wrote."""
    return Cell(
        row=row,
        prompt=prompt,
        family=family,
        repetition=repetition,
        prompt_tokens=prompt_tokens,
        tokens=outcome.tokens,
        seconds=outcome.seconds,
        prefill=outcome.prefill,
        draft=outcome.draft,
        target=outcome.target,
        steps=[list(step) for step in outcome.steps],
        forwards=outcome.forwards,
        rounds=outcome.rounds,
        each=[list(one) for one in outcome.each],
        texts=outcome.texts,
        score=outcome.score,
        **measured,
    )
