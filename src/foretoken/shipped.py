"""Names of the models whose weights ship with the package, and the folders they lie in."""

from __future__ import annotations

from pathlib import Path

from foretoken.errors import ConfigError, nearest

NAMES = ("text-target", "text-draft")
_WEIGHTS = Path(__file__).parent / "minis" / "weights"


def path(name: str) -> Path:
    """The folder of a shipped model, for any ``from_pretrained``."""
    if name not in NAMES:
        raise ConfigError(
            asked=f"the mini {name!r}",
            possible=", ".join(NAMES),
            do=f"did you mean {nearest(name, NAMES)}?",
        )
    return _WEIGHTS / name


def resolve(source: object) -> object:
    """The folder of a shipped model where `source` is its bare name, anything else as it stands.

    The bare name always means the shipped model; a folder of that name is written ./text-target.
    """
    return path(source) if isinstance(source, str) and source in NAMES else source
