"""Files of a head: named by the digest of what they hold, and given that name once written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def digest(path: Path) -> str:
    """A short name for a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def move(partial: Path, final: Path) -> None:
    """Give a written file its name once it is on the disk."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, final)
