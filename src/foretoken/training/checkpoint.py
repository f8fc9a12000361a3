"""Training checkpoints: one file each, complete or absent; the newest and the best are kept.

A file is written under a temporary name, flushed to the disk, and renamed. A process killed at any
moment leaves the previous checkpoint untouched.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from foretoken.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8})\.pt")
BEST = "best.pt"


def save(folder: Path, step: int, state: dict[str, Any], *, best: bool) -> Path:
    """Write the checkpoint of `step` atomically, drop older ones, and make it the best one if
    asked.
    """
    target, partial, spare = (
        folder / name for name in (f"step-{step:08d}.pt", ".partial", ".partial-best")
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # one that a kill left may be the best one's, too
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if best:  # first: a step's file says which one is the best
            spare.unlink(missing_ok=True)
            try:
                os.link(partial, spare)
            except OSError:  # a file system without links
                shutil.copyfile(partial, spare)
            os.replace(spare, folder / BEST)
        os.replace(partial, target)
        for other in folder.glob("step-*.pt"):
            if other != target:
                other.unlink()
    except (OSError, RuntimeError) as error:  # torch reports some short writes as RuntimeError
        partial.unlink(missing_ok=True)
        spare.unlink(missing_ok=True)
        kept = latest(folder)
        raise CheckpointError(
            asked=f"saving the checkpoint of step {step} in {folder}",
            possible=f"writing failed ({error}); last good checkpoint: {kept or 'none'}",
            do="free disk space or fix the permissions, then start the run again; it resumes",
        ) from error
    return target


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, if there is one."""
    found = (
        [path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name)]
        if folder.is_dir()
        else []
    )
    return max(found, default=None)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint: tensors and plain values only, never code."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
        raise CheckpointError(
            asked=f"resuming from {path}",
            possible=f"the file cannot be read ({error})",
            do="delete this file to start from the beginning",
        ) from error
    return state
