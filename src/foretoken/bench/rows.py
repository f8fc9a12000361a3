"""The rows of a comparison: their names and options, and our methods behind them.

`chain[depth=4,controller=cost_model]` is the method `chain` with options of its own; two rows may
share a method. Options that belong to the language model (`exact_bits`, `kernels`) get a model of
their own, for kernels are installed in place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from foretoken.coins import SeededCoins
from foretoken.engine.loop import Engine
from foretoken.engine.record import StepTrace, traces
from foretoken.errors import ConfigError, nearest
from foretoken.methods import METHODS, method
from foretoken.types import DecodeState, Reports, SamplingParams
from foretoken.warp import Warp

PEERS = ("hf:plain", "hf:compiled", "hf:assisted", "hf:prompt-lookup")
DEFAULT_METHODS = ("plain", "chain", "tree", "prompt-lookup", *PEERS)
FAMILIES = {  # many rows by one name; those that stand on data get it as the name's options
    "training-free": (
        "plain", "prompt-lookup", "token-recycling", "suffix", "lookahead", "rest", "rasd",
        "retrieval-dense", "layerskip", "del", "swift", "specee", "fused", "auto",
    ),
}  # fmt: skip
LANGUAGE_MODEL_OPTIONS = ("exact_bits", "kernels")


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A row as it was asked for."""

    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peer(self) -> bool:
        return self.method.startswith("hf:")

    @property
    def needs_draft(self) -> bool:
        return self.method == "hf:assisted" if self.peer else method(self.method).needs_draft

    @property
    def model_options(self) -> dict[str, Any]:
        return {k: v for k, v in self.options.items() if k in LANGUAGE_MODEL_OPTIONS}

    @property
    def method_options(self) -> dict[str, Any]:
        return {k: v for k, v in self.options.items() if k not in LANGUAGE_MODEL_OPTIONS}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One text and what it cost. Seconds run from prompt ids to the last new id, for everybody."""

    tokens: list[int]  # new ids, up to and with the end token
    seconds: float
    prefill: float | None = None  # None: the row cannot tell
    draft: float | None = None
    target: float | None = None
    steps: list[tuple[int, int, int, int]] = field(default_factory=list)
    #   per target forward: nodes drafted, depth drafted, accepted, emitted
    forwards: int | None = None  # target forwards that gave tokens


class Row(Protocol):
    """Something that writes."""

    spec: RowSpec
    note: str  # what a reader has to know: the setting chosen, say

    def write(self, prompt: Sequence[int], params: SamplingParams) -> Outcome: ...


class OwnRow:
    """One of our methods, through the same loop that `Session.generate` runs."""

    def __init__(self, spec: RowSpec, engine: Engine) -> None:
        self.spec, self.engine = spec, engine

    @property
    def note(self) -> str:
        """What the drafter has to tell by now."""
        drafter = self.engine.drafter
        return drafter.report() if isinstance(drafter, Reports) else ""

    def write(self, prompt: Sequence[int], params: SamplingParams) -> Outcome:
        tokens = list(prompt)
        warp = Warp(params, len(tokens), self.engine.target.vocab_size)
        row = DecodeState(tokens, len(tokens), params, SeededCoins(params.seed), warp)
        found: list[StepTrace] = []
        draft = target = prefill = 0.0
        began = perf_counter()
        for record in self.engine.run([row]):
            times = record.times
            if not found:  # what the first step's own clock did not see is the prompt's forward
                prefill = perf_counter() - began - times.draft - times.target - times.other
            draft, target = draft + times.draft, target + times.target
            found += traces(record)
        finish_device()
        return Outcome(
            tokens=row.new_tokens,
            seconds=perf_counter() - began,
            prefill=prefill,
            draft=draft,
            target=target,
            steps=[(t.drafted, t.depth, t.accepted, len(t.emitted)) for t in found],
            forwards=len(found),
        )


class Waiting:
    """A target on a GPU whose `score` returns when the work is done, not when it is launched.

    The loop's clock then books a forward under target; else whoever first reads a number pays.
    """

    def __init__(self, lm: Any) -> None:
        self._lm = lm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def score(self, *given: Any) -> Any:
        scores = self._lm.score(*given)
        finish_device()
        return scores


def finish_device() -> None:
    """Wait for the GPU, where there is one: a clock read earlier would flatter."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parse_methods(text: str | Sequence[str]) -> list[RowSpec]:
    """Rows from "plain,chain[depth=4],hf:plain" (or a list of such names)."""
    names = _split(text) if isinstance(text, str) else [str(name).strip() for name in text]
    specs = [spec for name in names if name for spec in _parse(name)]
    if not specs:
        raise ConfigError(
            "a bench without methods was asked for.",
            f"rows are {', '.join((*METHODS, *PEERS, *FAMILIES))}.",
            "name at least one.",
        )
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
    """The row of a name with its options, or all rows of a family."""
    match = re.fullmatch(r"([\w:+-]+)(?:\[(.*)\])?", name)
    known = (*METHODS, *PEERS, *FAMILIES)
    if match is None or match.group(1) not in known:
        asked = match.group(1) if match else name
        raise ConfigError(
            f"the row {name!r} was asked for.",
            f"rows are {', '.join(known)}, each with options like chain[depth=4].",
            f"did you mean {nearest(asked, known)}?",
        )
    if match.group(1) in METHODS and METHODS[match.group(1)].writes != "text":
        raise ConfigError(
            f"the row {name!r} was asked for.",
            "rows are compared by the tokens of one text per prompt; this method writes a scored "
            "set of texts, and plain is no baseline for it.",
            "run benchmarks/beams.py, which compares it with plain beam sampling.",
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
    return [_row(match.group(1), options)]


def _row(name: str, options: Mapping[str, Any]) -> RowSpec:
    label = name
    if options:
        label += "[" + ",".join(f"{k}={_written(v)}" for k, v in options.items()) + "]"
    return RowSpec(label, name, options)


def _family(name: str, given: Mapping[str, Any]) -> list[RowSpec]:
    """The rows of a family that have what they need."""
    needs = {row: METHODS[row].needs for row in FAMILIES[name]}
    possible = dict.fromkeys(need for several in needs.values() for need in several)
    for option in given:
        if option not in possible:
            raise ConfigError(
                f"option {option!r} was asked for with the rows of {name!r}.",
                f"they take the folders that some of them need: {', '.join(possible)}.",
                f"write for example {name}[datastore=./store], or name single rows.",
            )
    return [
        _row(row, {need: given[need] for need in several})
        for row, several in needs.items()
        if given.keys() >= set(several)
    ]


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


def _written(value: Any) -> str:
    """A value as a label shows it; of a path only the last name, for results travel."""
    if isinstance(value, str) and os.sep in value:
        return Path(value).name
    if isinstance(value, tuple):
        return "x".join(str(size) for size in value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
