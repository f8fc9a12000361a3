"""An ordinary language model as a draft model: a KV cache of its own, and no features read."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.contract import Features, LanguageModel
from foretoken.lm.views.few_rows import is_silenced
from foretoken.types import DecodeState, Ragged, Rows, Scores, Taps


class OrdinaryModel:
    """Guesses by the scores of `lm`, whose cache follows what the target takes."""

    taps: Taps = ()
    context: int | None = None

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self.vocab_size, self.hidden_size = lm.vocab_size, lm.hidden_size
        self.max_length = lm.max_length

    def open(self, row: DecodeState, features: Features | None) -> bool:
        if self.max_length is not None and len(row.tokens) > self.max_length:
            return False
        if is_silenced(self.lm, row.params):
            return False
        self.lm.prefill([row])
        return True

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        return self.lm.grow(rows, tokens, parents, taps)

    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        opened = [(r, path) for r, path in zip(rows, paths, strict=True) if path is not None]
        if opened:
            self.lm.commit([row for row, _ in opened], [path for _, path in opened])

    def close(self, row: DecodeState) -> None:
        self.lm.free([row])
