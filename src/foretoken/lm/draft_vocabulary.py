"""Which tokens a draft scores: all that the target knows, or those of a list.

A draft directory may hold `draft_vocabulary.json` beside its weights: {"version": 1, "vocab_size":
V, "tokens": [ascending ids]}. The model stays an ordinary one of V tokens; opened as a draft, only
the listed rows of its output layer are computed. Elsewhere the draft's law is zero, so the target
alone writes those tokens, and the written law stays the target's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.errors import CheckpointError, ConfigError
from foretoken.types import Few

NAME = "draft_vocabulary.json"
OFF = "off"  # every row, whatever the draft's directory says
VERSION = 1
FORM = f'a {NAME} is {{"version": {VERSION}, "vocab_size": V, "tokens": [ascending ids below V]}}.'


@dataclass(frozen=True, slots=True, eq=False)
class OutputRows:
    """The rows of a draft's output layer that are computed, and the target's tokens they score."""

    rows: Int[Tensor, "n"]  # ids of the draft
    tokens: Int[Tensor, "n"]  # ids of the target, one of each row
    width: int  # tokens of the target

    @classmethod
    def of_tokens(cls, tokens: Sequence[int], width: int) -> OutputRows:
        """Rows of a draft that has the target's own ids."""
        ids = torch.tensor(list(tokens), dtype=torch.long)
        return cls(ids, ids, width)

    def __len__(self) -> int:
        return len(self.tokens)

    def __str__(self) -> str:
        return f"{len(self):,} of {self.width:,}"

    def spread(self, logits: Float[Tensor, "n k"]) -> Float[Tensor, "n V"]:
        """Logits over all tokens of the target: -inf where no row stands for one."""
        return self.few(logits).spread()

    def few(self, logits: Float[Tensor, "n k"]) -> Few:
        """Logits of these rows, as all that a draft says."""
        return Few(logits, self.tokens, self.width)

    def among(self, kept: OutputRows | None) -> OutputRows:
        """Those whose id of the draft is among the rows that are kept (None: all are)."""
        if kept is None:
            return self
        both = torch.isin(self.rows, kept.rows)
        return OutputRows(self.rows[both], self.tokens[both], self.width)

    def to(self, device: torch.device) -> OutputRows:
        return OutputRows(self.rows.to(device), self.tokens.to(device), self.width)


def chosen_rows(asked: Any, source: Any, vocab_size: int) -> OutputRows | None:
    """The rows that a draft of `vocab_size` tokens computes; None: all of them.

    `asked` is None (what the directory of the draft says), "off", a file or folder, or ids.
    """
    if isinstance(asked, str) and asked == OFF:
        return None
    if asked is None:
        place = beside_model(source)
        tokens = None if place is None else read(place, vocab_size)
    elif isinstance(asked, str | Path):
        path = Path(asked).expanduser()
        tokens = read(path / NAME if path.is_dir() else path, vocab_size)
    else:
        tokens = checked(asked, vocab_size)
    if tokens is None or len(tokens) == vocab_size:
        return None
    return OutputRows.of_tokens(tokens, vocab_size)


def check_asked(asked: Any) -> None:
    """Refuse a file that is not there before any weight is read."""
    if isinstance(asked, str | Path) and asked != OFF and not Path(asked).expanduser().exists():
        raise ConfigError(
            f"the draft vocabulary {asked} was asked for.",
            "there is no such file.",
            "make one with `foretoken vocabulary`, or pass off for every token of the draft.",
        )


def beside_model(source: Any) -> Path | None:
    """The file in a draft's directory, if there is one."""
    if not isinstance(source, str | Path):
        source = getattr(getattr(source, "config", None), "name_or_path", None) or "/nonexistent"
    place = Path(source).expanduser() / NAME
    return place if place.is_file() else None


def checked(ids: Any, vocab_size: int) -> list[int]:
    """Ids that somebody passed, ascending; ConfigError for what is no list of tokens."""
    given = ids.tolist() if hasattr(ids, "tolist") else ids
    plain = isinstance(given, Sequence | set | frozenset | range)
    plain = plain and all(type(token) is int for token in given)
    tokens = sorted(set(given)) if plain else []
    if not tokens or tokens[0] < 0 or tokens[-1] >= vocab_size:
        told = f"{len(tokens)} ids" if plain else f"a {type(ids).__name__}"
        reach = f" from {tokens[0]} to {tokens[-1]}" if tokens else ""
        raise ConfigError(
            f"{told}{reach} were passed as the draft's vocabulary.",
            f"this draft has the tokens 0 to {vocab_size - 1}, and scores one of them or more.",
            f'pass ids among them, the path of a {NAME}, or "off" for all of them.',
        )
    return tokens


def read(path: Path, vocab_size: int) -> list[int]:
    """The tokens of a file; CheckpointError for one that is broken or of another vocabulary."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        refuse(path, f"cannot be read ({problem.strerror or problem})")
    except ValueError as problem:
        refuse(path, f"is no JSON ({problem})")
    if not isinstance(found, dict) or found.get("version") != VERSION:
        refuse(path, f"is not of version {VERSION}")
    tokens, size = found.get("tokens"), found.get("vocab_size")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        refuse(path, "has no list of ids as its tokens")
    if size != vocab_size:
        raise CheckpointError(
            f"the draft vocabulary {path} was asked for of a draft of {vocab_size} tokens.",
            f"it was made for {size} tokens, and its ids mean other words.",
            'make one for this draft: `foretoken vocabulary --help`, or pass "off".',
        )
    ascending = all(a < b for a, b in pairwise(tokens))
    if not tokens or not ascending or tokens[0] < 0 or tokens[-1] >= vocab_size:
        refuse(path, f"has tokens that are not ascending ids from 0 to {vocab_size - 1}")
    return tokens


def write(path: Path, tokens: Sequence[int], vocab_size: int) -> Path:
    """Write a file: whole, or not at all."""
    document = {
        "version": VERSION,
        "vocab_size": vocab_size,
        "tokens": checked(list(tokens), vocab_size),
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as problem:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"a draft vocabulary was to be written as {path}.",
            f"nothing can be written there ({problem.strerror or problem}).",
            "make room, or name a file in a folder that can be written.",
        ) from problem
    return path


def refuse(path: Path, why: str) -> NoReturn:
    raise CheckpointError(
        f"the draft vocabulary {path} was asked for, which {why}.",
        FORM,
        'make it again with `foretoken vocabulary`, or pass "off" for every token.',
    )


def put(folder: Path, tokens: Sequence[int] | None, vocab_size: int) -> None:
    """Write the file of a draft's directory; None: it scores all tokens, and an older file goes."""
    if tokens is None:
        (folder / NAME).unlink(missing_ok=True)
    else:
        write(folder / NAME, tokens, vocab_size)
