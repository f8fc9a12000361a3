"""A decoder whose states the output layer of another model reads as laws (EAGLE)."""

from __future__ import annotations

from dataclasses import replace

from foretoken.contract import LanguageModel
from foretoken.lm.views.view import TargetView
from foretoken.types import Layer, Ragged, Rows, Scores, Taps


class ReadByTarget(TargetView):
    """Laws over the tokens of `target`, from the last layer of `lm`, which has no outputs."""

    def __init__(self, lm: LanguageModel, target: LanguageModel) -> None:
        super().__init__(lm)
        self.target, self.vocab_size = target, target.vocab_size
        self.output_rows = getattr(target, "output_rows", None)

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Laws after new nodes, and the states asked for."""
        scores = self.lm.grow(rows, tokens, parents, (*taps, Layer(-1)))
        return [self.read(score, bool(taps)) for score in scores]

    def read(self, score: Scores, shown: bool) -> Scores:
        assert score.hidden is not None, "its last layer was asked for"
        logits = self.target.unembed(score.hidden[:, -1])
        return replace(score, said=logits, hidden=score.hidden[:, :-1] if shown else None)
