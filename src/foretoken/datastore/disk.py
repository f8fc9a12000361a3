"""Folders that are whole or not there, and disks that are full or take no files."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foretoken.errors import ConfigError


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A disk that is full, or takes no files, told in three parts."""
    try:
        yield
    except OSError as problem:
        raise ConfigError(
            f"a datastore in {folder} was to be written.",
            f"nothing can be written there ({problem.strerror or problem}).",
            "make room, or name a folder that can be written.",
        ) from problem


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its place when the block ends well and is gone when not.

    Every block has one of its own, so that two that make the same folder do not take each other's
    away. What a killed one leaves stays there: nobody can tell it from one that is being filled.
    """
    place = Path(os.path.expanduser(folder)).absolute()
    # `mkdtemp` would have no name twice either, but nobody else could read what it makes
    part = place.with_name(f".{place.name}.{secrets.token_hex(8)}.part")
    made = [parent for parent in place.parents if not parent.exists()]
    done = False
    try:
        with writing(folder):
            part.mkdir(parents=True)
        yield part
        with writing(folder):
            os.replace(part, place)  # over an empty folder at most
        done = True
    finally:
        if not done:
            shutil.rmtree(part, ignore_errors=True)
            with suppress(OSError):  # another block has begun to fill a folder there
                for parent in made:
                    if parent.is_dir():
                        parent.rmdir()
