"""Part of the target as its own draft model: weights, cache and early work are shared.

What was drafted so is known to the target's next scoring, so the engine has to score through the
`view` that drafts. A target that was not trained for it guesses so badly without its other part
that nothing can be won: such a part is not asked again (`hopeless`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.exit_evidence import too_rare
from foretoken.lm.views.wrapping import early_exits
from foretoken.types import DecodeState, Ragged, Rows, Scores, Taps

CREDIT = 4.0  # right guesses that are believed beside those seen, so that few condemn nobody


class PartOfTarget:
    """Base of such models: the target's own cache follows the text, so there is nothing to keep."""

    taps: Taps = ()
    context: int | None = None
    hidden_size = 0  # its states are shown to no stopping rule
    view: Any

    def __init__(self, target: LanguageModel) -> None:
        self.vocab_size, self.max_length = target.vocab_size, target.max_length
        self.hopeless = False  # no draft of it can pay

    def rehearsed(
        self, row: DecodeState, seen: Features | None, right: int, asked: int, price: float
    ) -> None:
        """See whether guesses, each of which costs `price` plain steps at least, can pay."""
        self.hopeless = too_rare(right, asked, price, CREDIT)

    def open(self, row: DecodeState, features: Features | None) -> bool:
        return not self.hopeless

    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        return None

    def close(self, row: DecodeState) -> None:
        row.private.pop(self, None)


class EarlyExitModel(PartOfTarget):
    """The first layers, norm and head: override `depth`, the layers that draft for a row."""

    def __init__(self, target: LanguageModel, depths: Sequence[int]) -> None:
        super().__init__(target)
        self.view = early_exits(target, depths)

    def depth(self, row: DecodeState) -> int:
        """Layers, the same ones while a tree is open."""
        raise NotImplementedError

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        found = self.view.draft(rows, tokens, parents, [self.depth(row) for row in rows])
        return [Scores(logits) for logits in found]
