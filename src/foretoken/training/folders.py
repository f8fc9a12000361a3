"""The folder of a run: it can be written, and one process at a time works there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from foretoken.errors import ConfigError

LOCK = ".lock"


@contextmanager
def working_alone(folder: Path) -> Iterator[None]:
    """Nobody else works in the folder meanwhile; ConfigError where somebody does already."""
    taken = ConfigError(
        asked=f"working in {folder}",
        possible="another run is at work there, and each would delete what the other makes",
        do="wait for it or end it, or choose another folder",
    )
    try:
        try_writing(folder)
        lock = alone_in(folder, taken)
    except OSError as error:
        raise unwritable(folder, str(error)) from error
    try:
        yield
    finally:
        if lock is not None:
            if still_there(folder / LOCK, lock):  # not another's, where somebody took it away
                with suppress(OSError):  # while it is held: whoever waits looks whether it is there
                    (folder / LOCK).unlink()
            lock.close()


def check_idle(folder: Path) -> None:
    """ConfigError where somebody is at work in the folder or below: it is to be deleted."""
    for lock in sorted(folder.rglob(LOCK)):
        with working_alone(lock.parent):
            pass


def alone_in(folder: Path, taken: ConfigError) -> IO[str] | None:
    """A lock on the folder, held until it is closed; raises `taken` where somebody else has it.

    None where the system has no such locks.
    """
    try:
        import fcntl  # not on every system
    except ImportError:
        return None
    while True:
        file = (folder / LOCK).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise taken from error
        except OSError:  # a file system without locks, as clusters have them
            file.close()
            return None
        if still_there(folder / LOCK, file):
            return file
        file.close()  # whoever had it has taken it away


def still_there(path: Path, file: IO[str]) -> bool:
    """Whether an open file is the one that has this path by now."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def try_writing(folder: Path) -> None:
    """Make the folder and write into it; OSError where that cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()


def unwritable(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        asked=f"working in {folder}",
        possible=f"the folder cannot be written ({why})",
        do="choose another folder",
    )
