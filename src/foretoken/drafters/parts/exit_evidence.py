"""Whether a model's early exits can ever pay: looked at once, on the first prompts, and remembered.

A model that was not trained for early exits says something else behind its first half than behind
its last layer nearly everywhere. A few places tell: if the deepest exit considered names the
model's own token in a smaller share of them than even the shallowest exit costs of a forward, no
draft behind any exit is worth making. What was seen is kept by model for as long as it lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.lm.views.view import innermost

ENOUGH = 24  # places after which nobody looks again
CREDIT = 2.0  # hits that are believed beside those seen, so that few places condemn nobody

_evidence: WeakKeyDictionary[Any, ExitEvidence] = WeakKeyDictionary()


@dataclass(slots=True, eq=False)
class ExitEvidence:
    """How often the deepest exit of a model said what its last layer said."""

    right: int = 0
    places: int = 0

    @property
    def complete(self) -> bool:
        return self.places >= ENOUGH

    def add(self, tokens: Tensor) -> None:
        """Tokens [n, 2] of the deepest exit and of the last layer."""
        self.right += int((tokens[:, 0] == tokens[:, 1]).sum())
        self.places += len(tokens)

    def hopeless(self, price: float) -> bool:
        """Whether exits are right too rarely for one that takes this share of a forward."""
        return too_rare(self.right, self.places, price, CREDIT)


def too_rare(right: int, asked: int, price: float, credit: float) -> bool:
    """Whether guesses that cost this share of a forward each were right too rarely to ever pay;
    never of few. `credit`: right ones that are believed beside those seen.
    """
    return asked >= ENOUGH and (right + credit) / (asked + credit) < price


def evidence_of(target: LanguageModel) -> ExitEvidence:
    """What is known of the exits of the model below all views."""
    lm = innermost(target)
    return _evidence.setdefault(getattr(lm, "model", lm), ExitEvidence())
