"""Files of a bench: a folder tried before any work, and results that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from foretoken.errors import ConfigError

ROOM = 1 << 20  # bytes tried: results of a small bench; a full disk takes empty files gladly


def writable(out: Path) -> Path:
    """The output folder, made and tried before any work; nothing stays behind if it cannot be."""
    out = Path(out)
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    probe = out / ".writable"
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            _written(probe, bytes(ROOM))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as problem:
        for folder in made:
            if folder.is_dir():
                folder.rmdir()
        raise unwritable(out, problem, "name a folder that can be written with --out.") from problem
    return out


def replace(path: Path, text: str) -> Path:
    """Put `text` at `path`, whole or not at all: a reader never sees half of it."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _written(part, text.encode())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as problem:
        way = "make room, or name a file in a folder that can be written."
        raise unwritable(path, problem, way) from problem
    return path


def unwritable(path: Path, problem: OSError, do: str) -> ConfigError:
    """A disk or a folder that takes no files, in three parts."""
    return ConfigError(
        f"results in {path}.",
        f"nothing can be written there ({problem.strerror or problem}).",
        do,
    )


def _written(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
