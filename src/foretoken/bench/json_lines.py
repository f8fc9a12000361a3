"""Files of finished work: one JSON object a line, each on disk before the next piece of work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretoken.bench.files import replace, unwritable
from foretoken.errors import ConfigError


def append(path: Path, entry: dict[str, Any], what: str) -> None:
    """Add a line; `what` a line holds, for the message of a full disk."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        way = f"make room and go on with --resume: finished {what}s are kept."
        raise unwritable(path, problem, way) from problem


def begin(path: Path, asked: dict[str, Any]) -> None:
    """A new file, whose first line says what was asked."""
    replace(path, json.dumps({"kind": "header", "asked": asked}) + "\n")


def read(path: Path, take: Callable[[str, dict[str, Any]], None], what: str) -> dict[str, Any]:
    """What was asked; `take` gets the kind of every other line and what it holds.

    A last line cut off by a kill is removed. A ConfigError tells of a line that cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        replace(path, text)
    asked: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = json.loads(line)
            kind = entry.pop("kind")
            if kind == "header":
                asked = entry["asked"]
            else:
                take(kind, entry)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as problem:
            raise ConfigError(
                f"the finished {what}s of {path}.",
                f"line {number} of {path.name} cannot be read ({type(problem).__name__}).",
                f"delete that line to measure its {what} again, or name another --out.",
            ) from problem
    return asked
