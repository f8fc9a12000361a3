"""An ordinary language model as a draft model: a KV cache of its own, and no features read."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.unread import Unread
from foretoken.lm.views.few_rows import is_silenced
from foretoken.trees.growing import Grown, GrowthRule, grows_trees
from foretoken.types import DecodeState, Ragged, Rows, Scores, Taps


class OrdinaryModel:
    """Guesses by the scores of `lm`, whose cache follows what the target takes."""

    taps: Taps = ()
    context: int | None = None

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self.vocab_size, self.hidden_size = lm.vocab_size, lm.hidden_size
        self.max_length = lm.max_length
        # Rows that were never drafted for. The model is looked up each time, as another takes its
        # place while a draft learns.
        self.unread = Unread(lambda row: self.lm.missing(row))

    def open(self, row: DecodeState, features: Features | None) -> bool:
        if self.max_length is not None and len(row.tokens) > self.max_length:
            return False
        if is_silenced(self.lm, row.params):
            return False
        self.unread.add(row)
        return True

    def read(self, rows: Rows) -> None:
        """Feed what there is of texts that were not read yet."""
        self.unread.read(rows, self.feed)

    def feed(self, rows: list[DecodeState]) -> None:
        try:
            self.lm.prefill(rows)
        except BaseException:  # nobody knows what was read: each begins anew
            self.lm.free(rows)
            raise

    def waits(self, row: DecodeState) -> bool:
        """Whether this row's text is yet to be read."""
        return row in self.unread

    def to_read(self, row: DecodeState) -> float:
        """Seconds until this row can be drafted for."""
        return self.unread.to_read(row)

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        self.read(rows)
        return self.lm.grow(rows, tokens, parents, taps)

    def grow_trees(
        self, rows: Rows, rules: Sequence[GrowthRule], names: Int[Tensor, "n"] | None = None
    ) -> list[Grown | None]:
        """New trees of rows in one call; None: to be asked level by level instead."""
        if not grows_trees(self.lm):
            return [None] * len(rows)
        self.read(rows)
        return self.lm.grow_trees(rows, rules, names)

    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        opened = [(r, path) for r, path in zip(rows, paths, strict=True) if path is not None]
        if opened:
            self.lm.commit([row for row, _ in opened], [path for _, path in opened])

    def close(self, row: DecodeState) -> None:
        self.unread.discard(row)
        self.lm.free([row])
