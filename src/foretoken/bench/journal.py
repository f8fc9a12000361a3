"""Finished work on disk: one JSON line per cell, so that an interrupted bench loses nothing.

A cell is one text: (row, prompt, repetition). The journal starts with a header that says what was
asked; going on with other models, prompts or sampling would mix what cannot be compared.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretoken.bench.files import replace, unwritable
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
    correct: bool | None = None  # None: nothing to check
    load: list[float] = field(default_factory=list)  # load average (1 min) before and after
    peak_rss: int | None = None  # bytes of the whole process, every model of the bench included
    rss_growth: int | None = None  # how far the peak rose above the level before the cell
    peak_cuda: int | None = None
    texts: int | None = None  # of beams, and the score of the best one
    score: float | None = None


@dataclass(slots=True)
class Journal:
    """The file of finished cells, and what it already holds."""

    path: Path
    cells: list[Cell] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # row -> why
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)  # kind -> key -> value
    finished: bool = False

    def done(self) -> set[tuple[str, str, int]]:
        return {(cell.row, cell.prompt, cell.repetition) for cell in self.cells}

    def add(self, cell: Cell) -> None:
        self.cells.append(cell)
        self._write({"kind": "cell", **asdict(cell)})

    def fail(self, row: str, why: str) -> None:
        self.failed[row] = why
        self._write({"kind": "failed", "row": row, "why": why})

    def note(self, kind: str, key: str, value: Any) -> None:
        """Something a later run must not find out anew: a turn's context, a peer's setting."""
        self.notes.setdefault(kind, {})[key] = value
        self._write({"kind": "note", "about": kind, "key": key, "value": value})

    def finish(self) -> None:
        self.finished = True
        self._write({"kind": "finished"})

    def _write(self, entry: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as problem:
            way = "make room and go on with --resume: finished cells are kept."
            raise unwritable(self.path, problem, way) from problem


def open_journal(path: Path, asked: dict[str, Any], resume: bool) -> Journal:
    """A journal for `asked`: a new one, or with `resume` the one an interrupted run left."""
    if path.exists():
        old_asked, journal = read_journal(path)
        if resume:
            _check_same(asked, old_asked, path)
            journal.failed.clear()  # what failed is tried again; the cause may be gone
            return journal
        if journal.cells and not journal.finished:
            raise ConfigError(
                f"a new bench in {path.parent}.",
                f"an interrupted one left {len(journal.cells)} finished cells there.",
                "go on with --resume, or name another --out.",
            )
    replace(path, json.dumps({"kind": "header", "asked": asked}) + "\n")
    return Journal(path)


def read_journal(path: Path) -> tuple[dict[str, Any], Journal]:
    """What was asked and what was finished. A last line cut off by a kill is removed."""
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        replace(path, text)
    journal, asked = Journal(path), {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = json.loads(line)
            kind = entry.pop("kind")
            if kind == "header":
                asked = entry["asked"]
            elif kind == "cell":
                journal.cells.append(Cell(**entry))
            elif kind == "failed":
                journal.failed[entry["row"]] = entry["why"]
            elif kind == "note":
                journal.notes.setdefault(entry["about"], {})[entry["key"]] = entry["value"]
            else:
                journal.finished = kind == "finished"
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as problem:
            raise ConfigError(
                f"the finished cells of {path}.",
                f"line {number} of {path.name} cannot be read ({problem.__class__.__name__}).",
                "delete that line to measure its cell again, or name another --out.",
            ) from problem
    return asked, journal


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
        texts=outcome.texts,
        score=outcome.score,
        **measured,
    )
