"""The rows of a comparison: their names and options.

`chain[depth=4,controller=cost_model]` is the method `chain` with options of its own; two rows may
share a method. Options of the language model (`exact_bits`, `kernels`, `compile`) get a model of
their own, for kernels are installed in place, and so does `draft_vocabulary` (a file, or off).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken import methods
from foretoken.bench.catalogue import (
    ENGINES,
    PEERS,
    engine_of,
    is_peer,
    needs,
    needs_draft,
    writes_together,
)
from foretoken.errors import ConfigError, meant
from foretoken.methods import METHODS

DEFAULT_METHODS = ("plain", "chain", "tree", "prompt-lookup", *PEERS)
UNTRAINED = ("baseline", "look-up", "portfolio", "self-speculation")  # families of METHODS
FAMILIES = {  # many rows by one name; those that stand on data get it as the name's options
    "training-free": tuple(
        row.name
        for family in methods.FAMILIES
        if family.name in UNTRAINED
        for row in family.methods
    ),
}
KNOWN = (*METHODS, *PEERS, *ENGINES, *FAMILIES)
OF_DRAFT = "draft_vocabulary"  # the tokens that a row's draft scores
LANGUAGE_MODEL_OPTIONS = ("exact_bits", "kernels", "compile", OF_DRAFT)


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A row as it was asked for."""

    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peer(self) -> bool:
        return is_peer(self.method)

    @property
    def engine(self) -> str | None:
        return engine_of(self.method)

    @property
    def needs_draft(self) -> bool:
        return needs_draft(self.method)

    @property
    def model_options(self) -> dict[str, Any]:
        return {k: v for k, v in self.options.items() if k in LANGUAGE_MODEL_OPTIONS}

    @property
    def draft(self) -> str | None:
        """The draft model of its own that the row names; None: it takes the bench's."""
        return self.options.get("draft") if self.needs_draft else None

    @property
    def method_options(self) -> dict[str, Any]:
        others = (*LANGUAGE_MODEL_OPTIONS, *(["draft"] if self.draft else []))
        return {k: v for k, v in self.options.items() if k not in others}


class DefaultRows(list[str | RowSpec]):
    """The default rows that can be measured, with a line about those that are left out."""

    left_out: tuple[str, ...] = ()


def default_methods(draft: Any, requests: int = 1) -> DefaultRows:
    """What is compared where no rows are named: the default ones that this pair can run, with so
    many requests at once.
    """
    able = [name for name in DEFAULT_METHODS if draft is not None or not needs_draft(name)]
    alone = [name for name in able if requests > 1 and not writes_together(name)]
    found = DefaultRows(name for name in able if name not in alone)
    if alone:
        found.left_out = (
            f"{requests} requests at once leave out {', '.join(alone)}: rows that write one text "
            "at a time",
        )
    return found


def parse_methods(text: str | Sequence[str | RowSpec]) -> list[RowSpec]:
    """Rows from "plain,chain[depth=4],hf:plain", or a list of such names and of rows."""
    names = _split(text) if isinstance(text, str) else text
    specs = [
        spec
        for name in names
        for spec in ([name] if isinstance(name, RowSpec) else _parse(name.strip()))
    ]
    if not specs:
        raise ConfigError(
            "a bench without methods was asked for.",
            f"rows are {', '.join(KNOWN)}.",
            "name at least one.",
        )
    specs = _told_apart(specs)
    for n, spec in enumerate(specs):
        if spec.label in {other.label for other in specs[:n]}:
            raise ConfigError(
                f"the row {spec.label} was asked for twice.",
                "rows are told apart by their names.",
                "name it once; repetitions are set by --repetitions.",
            )
    return specs


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text)]


def _parse(name: str) -> list[RowSpec]:
    """The row of a name with its options, or all rows of a family; none of an empty name."""
    if not name:
        return []
    match = re.fullmatch(r"([\w:+-]+)(?:\[(.*)\])?", name)
    if match is None or match.group(1) not in KNOWN:
        asked = match.group(1) if match else name
        raise ConfigError(
            f"the row {name!r} was asked for.",
            f"rows are {', '.join(KNOWN)}, each with options like chain[depth=4].",
            meant(asked, KNOWN),
        )
    options = {}
    for item in filter(None, (part.strip() for part in (match.group(2) or "").split(","))):
        key, equals, value = item.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ConfigError(
                f"the row {name!r} was asked for.",
                f"options are written key=value; {item!r} is not.",
                "write for example chain[depth=4,controller=cost_model].",
            )
        options[key.strip()] = value_of(value.strip())
    if match.group(1) in FAMILIES:
        return _family(match.group(1), options)
    return [row_of(match.group(1), options)]


def row_of(
    name: str, options: Mapping[str, Any], names: Mapping[Path, str] | None = None
) -> RowSpec:
    """The row of a method with options, labelled as it is written; paths as `names` has them."""
    label = name
    if options:
        label += "[" + ",".join(f"{k}={_written(v, names)}" for k, v in options.items()) + "]"
    return RowSpec(label, name, options)


def _told_apart(specs: Sequence[RowSpec]) -> list[RowSpec]:
    """The rows; where several have one label, folders in it get names that tell them apart.

    All of them, the first one too: else its label would mean another row in another order.
    """
    alike: dict[str, list[RowSpec]] = {}
    for spec in specs:
        if spec.label == row_of(spec.method, spec.options).label:  # and is no name of its own
            alike.setdefault(spec.label, []).append(spec)
    names = {
        label: short_names(v for spec in rows for v in spec.options.values() if isinstance(v, str))
        for label, rows in alike.items()
        if len(rows) > 1
    }
    return [
        row_of(spec.method, spec.options, names[spec.label])
        if spec.label in names and spec in alike[spec.label]
        else spec
        for spec in specs
    ]


def short_names(paths: Iterable[str]) -> dict[Path, str]:
    """The last part of each path, or as many last parts as tell it from all the others."""
    places = list(dict.fromkeys(Path(path) for path in paths))
    found: dict[Path, str] = {}
    for length in range(1, 1 + max((len(place.parts) for place in places), default=0)):
        ends = {place: "-".join(place.parts[-length:]) for place in places if place not in found}
        often = Counter([*ends.values(), *found.values()])
        found |= {place: end for place, end in ends.items() if often[end] == 1}
    return {place: found.get(place, str(place)) for place in places}


def _family(name: str, given: Mapping[str, Any]) -> list[RowSpec]:
    """The rows of a family that have what they need."""
    wanted = {row: needs(row) for row in FAMILIES[name]}
    possible = dict.fromkeys(need for several in wanted.values() for need in several)
    for option in given:
        if option not in possible:
            raise ConfigError(
                f"option {option!r} was asked for with the rows of {name!r}.",
                f"they take the folders that some of them need: {', '.join(possible)}.",
                f"write for example {name}[datastore=./store], or name single rows.",
            )
    return [
        row_of(name, {need: given[need] for need in several})
        for name, several in wanted.items()
        if given.keys() >= set(several) and not needs_draft(name)
    ]


def left_out(text: str | Sequence[str | RowSpec]) -> list[str]:
    """Which rows of the families in "training-free,chain", or of the default ones, are left out,
    and why.
    """
    given = _split(text) if isinstance(text, str) else text
    names = [name for name in given if isinstance(name, str)]
    asked = {spec.method for spec in parse_methods(text)}
    told = list(given.left_out) if isinstance(given, DefaultRows) else []
    for family in (name for name in names if name.split("[")[0] in FAMILIES):
        for row in FAMILIES[family.split("[")[0]]:
            if row in asked:
                continue
            missing = ["a second model"] * needs_draft(row)
            missing += [f"{need}=FOLDER in its brackets" for need in needs(row)]
            told.append(f"{family} leaves out {row}, which takes {' and '.join(missing)}")
    return told


def value_of(text: str) -> Any:
    """A number, truth value, none or shape (4x2x2) where it reads as one, else the text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if re.fullmatch(r"\d+(x\d+)+", text):
        return tuple(int(size) for size in text.split("x"))
    return text


def _written(value: Any, names: Mapping[Path, str] | None = None) -> str:
    """A value as a label shows it; of a path only the last name, for results travel, or the one it
    has in `names`.
    """
    if names and isinstance(value, str):
        return names[Path(value)]
    if isinstance(value, str) and os.sep in value:
        return Path(value).name
    if isinstance(value, tuple | list):
        return "x".join(str(size) for size in value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
