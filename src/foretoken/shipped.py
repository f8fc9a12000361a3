"""Models with a bare name: those whose weights ship, and those fetched into the user's cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

from foretoken.errors import CheckpointError, ConfigError, meant

NAMES = ("text-target", "text-draft")
TRAINED = ("smollm2-135m-draft", "smollm2-135m-eagle3")  # a draft and a head for a fetched model
FETCHED = ("smollm2-135m",)  # `foretoken minis get NAME` writes their folders
KNOWN = (*NAMES, *TRAINED, *FETCHED)
RECORD = "contents.json"  # in a fetched folder: its files with their sizes and checksums
_WEIGHTS = Path(__file__).parent / "minis" / "weights"


def path(name: str) -> Path:
    """The folder of a model of this table, for any ``from_pretrained``."""
    if name in FETCHED:
        return _fetched(name)
    if name not in (*NAMES, *TRAINED):
        raise ConfigError(
            asked=f"the mini {name!r}",
            possible=", ".join(KNOWN),
            do=meant(name, KNOWN),
        )
    return _WEIGHTS / name


def resolve(source: object) -> object:
    """The folder of a model of this table where `source` is its bare name, else `source` itself.

    The bare name always means the model of this table; a folder of that name is written
    ./text-target.
    """
    known = isinstance(source, str) and source in KNOWN
    return path(str(source)) if known else source


def cache() -> Path:
    """Where fetched models are: $FORETOKEN_MODELS, else foretoken/models in the user's cache."""
    if chosen := os.environ.get("FORETOKEN_MODELS"):
        return Path(chosen).expanduser()
    return user_cache() / "models"


def user_cache() -> Path:
    """Our folder among what this user's programs keep and could make again."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # the XDG specification: a relative path is to be ignored
        try:
            caches = Path.home() / ".cache"
        except RuntimeError as error:
            raise ConfigError(
                asked="the cache of this user was looked for.",
                possible="the system knows no home directory of this user.",
                do="set XDG_CACHE_HOME to a folder that may be written to.",
            ) from error
    return caches / "foretoken"


def is_whole(folder: Path) -> bool:
    """Whether a fetched folder holds every file of its record, each in its size."""
    try:
        files = json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]
        sizes = {name: (folder / name).stat().st_size for name in files}
        return bool(files) and all(sizes[name] == files[name]["bytes"] for name in files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # not there, or no record of ours: whoever fetches writes it anew


def _fetched(name: str) -> Path:
    folder = cache() / name
    if not is_whole(folder):
        state = "is damaged there" if folder.exists() else "is not there yet"
        raise CheckpointError(
            asked=f"the model {name} was asked for.",
            possible=f"it is fetched once, into {cache()}, and {state}.",
            do=f"run `foretoken minis get {name}`.",
        )
    return folder
