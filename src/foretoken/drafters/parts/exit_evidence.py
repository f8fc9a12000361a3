"""Whether a model's early exits can ever pay: looked at once, on the first texts, and remembered.

A model that was not trained for early exits says something else behind its first half than behind
its last layer nearly everywhere. A few places tell: a draft behind an exit that names the model's
own token in a smaller share of them than it costs of a forward loses by every token, however long
it is. Where that is so of all exits considered, none is worth making. What was seen is kept by
model for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.lm.views.view import innermost

ENOUGH = 24  # places after which nobody looks again
CREDIT = 2.0  # hits that are believed beside those seen, so that few places condemn nobody

# by model: how often its weights had changed, and exits by their depths
_evidence: WeakKeyDictionary[Any, tuple[int, dict[tuple[int, ...], ExitEvidence]]] = (
    WeakKeyDictionary()
)


@dataclass(slots=True, eq=False)
class ExitEvidence:
    """How often some exits of a model, `depths` layers deep, said what its last layer said."""

    depths: tuple[int, ...]
    right: list[int] = field(init=False)
    places: int = 0

    def __post_init__(self) -> None:
        self.right = [0] * len(self.depths)

    @property
    def complete(self) -> bool:
        return self.places >= ENOUGH

    def add(self, tokens: Tensor) -> None:
        """Tokens [n, E + 1] of the exits and of the last layer."""
        fresh = (tokens[:, :-1] == tokens[:, -1:]).sum(0).tolist()
        self.right = [old + new for old, new in zip(self.right, fresh, strict=True)]
        self.places += len(tokens)

    def hopeless(self, prices: Sequence[float]) -> bool:
        """Whether every exit is right too rarely for the share of a forward that it takes."""
        return all(
            too_rare(right, self.places, price, CREDIT)
            for right, price in zip(self.right, prices, strict=True)
        )


def too_rare(right: int, asked: int, price: float, credit: float) -> bool:
    """Whether guesses that cost this share of a forward each were right too rarely to ever pay;
    never of few. `credit`: right ones that are believed beside those seen.
    """
    return asked >= ENOUGH and (right + credit) / (asked + credit) < price


def evidence_of(target: LanguageModel, depths: Sequence[int]) -> ExitEvidence:
    """What is known of these exits of the model below all views, with the weights of now."""
    lm, exits = innermost(target), tuple(depths)
    model, shared = getattr(lm, "model", lm), getattr(lm, "shared", None)
    changes = 0 if shared is None else shared.changes
    before, known = _evidence.get(model, (changes, {}))
    if before != changes:
        known = {}
    _evidence[model] = changes, known
    found: ExitEvidence = known.setdefault(exits, ExitEvidence(exits))
    return found
