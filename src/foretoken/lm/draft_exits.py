"""Behind which layers a sorted draft may be left, and how sure it must be there.

A draft directory may hold `draft_exits.json` beside its weights: {"version": 1, "layers": [2, 4,
6], "thresholds": [0.6, 0.5]}. The model stays an ordinary one; opened as a draft, it leaves its
layers behind the first of these whose likeliest token has at least that chance, before any
temperature. The last one asks nothing. A threshold above 1 is an exit that nobody takes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from foretoken.errors import CheckpointError, ConfigError

NAME = "draft_exits.json"
OFF = "off"  # all layers for every token
VERSION = 1
NEVER = 2.0  # a threshold that no probability reaches
FORM = (
    f'a {NAME} is {{"version": {VERSION}, "layers": [ascending, the last one all of them], '
    '"thresholds": [one from 0 up for each exit but the last]}.'
)


@dataclass(frozen=True, slots=True)
class Exits:
    """Layers before each exit, ascending, and the least confidence of all but the last."""

    layers: tuple[int, ...]
    thresholds: tuple[float, ...]

    def fits(self, layers: int | None = None) -> bool:
        """Whether these are exits of a draft, of one with this many layers."""
        ascending = all(a < b for a, b in pairwise((0, *self.layers)))
        whole = layers is None or self.layers[-1] == layers
        counted = len(self.thresholds) == len(self.layers) - 1
        return ascending and whole and counted and all(t >= 0.0 for t in self.thresholds)

    @property
    def asked(self) -> Exits:
        """Those that can be taken: one of threshold 0 hides what lies behind it."""
        layers, thresholds = [], []
        for layer, threshold in zip(self.layers, (*self.thresholds, 0.0), strict=True):
            if threshold <= 1.0:
                layers.append(layer)
                thresholds.append(threshold)
            if threshold == 0.0:
                break
        return Exits(tuple(layers), tuple(thresholds[:-1]))

    def at(self, *thresholds: float) -> Exits:
        """The same layers with other thresholds."""
        return Exits(self.layers, thresholds)

    def only(self, exit: int) -> Exits:
        """Every token leaves at this one of the exits."""
        last = len(self.layers) - 1
        return self.at(*(0.0 if i == exit else NEVER for i in range(last)))

    def __str__(self) -> str:
        told = [f"{n} from {t:g}" for n, t in zip(self.layers, self.thresholds, strict=False)]
        return ", ".join([*told, f"{self.layers[-1]} else"])

    def text(self) -> str:
        """The text of a file."""
        found = {"version": VERSION, "layers": self.layers, "thresholds": self.thresholds}
        return json.dumps(found) + "\n"


def chosen_exits(asked: Any, source: Any, layers: int) -> Exits | None:
    """The exits of a draft of so many layers; None: it has one, behind them all.

    `asked` is None (what the directory of the draft says), "off", or a threshold for every exit
    but the last; a single number stands for all of them.
    """
    if isinstance(asked, str) and asked == OFF:
        return None
    place = beside_model(source)
    if place is None:
        if asked is None:
            return None
        raise ConfigError(
            f"draft_thresholds={asked!r} was asked for.",
            "this draft has one exit, behind its last layer: only a sorted one has more.",
            "leave the thresholds out, or make such a draft with `foretoken train sorted`.",
        )
    found = read(place, layers)
    return found if asked is None else found.at(*thresholds_of(asked, len(found.layers) - 1))


def thresholds_of(asked: Any, count: int) -> tuple[float, ...]:
    """Thresholds that somebody passed; ConfigError for what is none for each exit."""
    values = (
        tuple(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else (asked,)
    )
    if len(values) == 1:
        values *= count
    numbers = [v for v in values if type(v) in (int, float) and v >= 0.0]
    if not len(numbers) == len(values) == count:
        raise ConfigError(
            f"draft_thresholds={asked!r} was asked for.",
            f"a threshold is a number from 0 (always left there) up to above 1 (never), and this "
            f"draft takes {count} of them.",
            'pass one for all exits, one for each but the last, or "off" for all layers.',
        )
    return tuple(map(float, numbers))


def beside_model(source: Any) -> Path | None:
    """The file in a draft's directory, if there is one."""
    if not isinstance(source, str | Path):
        source = getattr(getattr(source, "config", None), "name_or_path", None) or "/nonexistent"
    place = Path(source).expanduser() / NAME
    return place if place.is_file() else None


def read(path: Path, layers: int) -> Exits:
    """The exits of a file; CheckpointError for one that is broken or of another draft."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        assert said["version"] == VERSION
        found = Exits(tuple(said["layers"]), tuple(map(float, said["thresholds"])))
        good = found.fits(layers) and all(type(layer) is int for layer in found.layers)
    except (OSError, ValueError, TypeError, LookupError, AssertionError) as problem:
        good, why = False, f"it cannot be read ({type(problem).__name__}: {problem})"
    else:
        why = f"it says {found}, and the draft has {layers} layers"
    if not good:
        raise CheckpointError(
            f"the exits of a draft, {path}, were asked for.",
            f"{why}; {FORM}",
            'make the draft again with `foretoken train sorted`, or pass draft_thresholds="off".',
        )
    return found
