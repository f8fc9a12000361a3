"""Small models we train ourselves, their data, recipes, shipped weights and widened forms."""

from __future__ import annotations

from pathlib import Path

from foretoken.errors import ConfigError, nearest

NAMES = ("text-target", "text-draft")  # whose weights ship with the package
_WEIGHTS = Path(__file__).parent / "weights"


def path(name: str) -> Path:
    """The folder of a shipped mini, for any ``from_pretrained``."""
    if name not in NAMES:
        raise ConfigError(
            asked=f"the mini {name!r}",
            possible=", ".join(NAMES),
            do=f"did you mean {nearest(name, NAMES)}?",
        )
    return _WEIGHTS / name
