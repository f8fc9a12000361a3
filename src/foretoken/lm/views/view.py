"""A view of a target: a language model that wraps another one and changes some of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from foretoken.contract import LanguageModel, LayerCache
from foretoken.trees.growing import Grown, GrowthRule
from foretoken.types import Caps, DecodeState, Draft, Ragged, Rows, Scores, Taps


class TargetView:
    """The wrapped model but for what a subclass overrides; views can be stacked.

    Whatever is not named here (`layers`, `close`, `prune`, ...) is the wrapped model's, too.
    """

    lossless = True  # scores are the wrapped model's

    caps: Caps
    vocab_size: int
    hidden_size: int
    max_length: int | None
    verified: float

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self.base: Any = innermost(lm)  # the model itself: its layers, its cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["lm"], name)

    def prefill(
        self, rows: Rows, taps: Taps = (), *, limit: int | None = None, last: int | None = None
    ) -> list[Float[Tensor, "S L H"] | None]:
        return self.lm.prefill(rows, taps, limit=limit, last=last)

    def missing(self, row: DecodeState) -> int:
        return self.lm.missing(row)

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        return self.lm.score(rows, drafts, taps)

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        return self.lm.grow(rows, tokens, parents, taps)

    def grow_trees(
        self, rows: Rows, rules: Sequence[GrowthRule], names: Int[Tensor, "n"] | None = None
    ) -> list[Grown | None]:
        return [None] * len(rows)  # what a view changes of the scores would be left out

    def commit(self, rows: Rows, paths: Ragged) -> None:
        self.lm.commit(rows, paths)

    def free(self, rows: Rows) -> None:
        self.lm.free(rows)

    def self_check(self, row: DecodeState) -> None:
        self.lm.self_check(row)

    def embed(self, tokens: Sequence[int]) -> Float[Tensor, "n H"]:
        return self.lm.embed(tokens)

    def unembed(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        return self.lm.unembed(hidden)

    def layer_cache(self, layer: int) -> LayerCache:
        return self.lm.layer_cache(layer)


def innermost(lm: LanguageModel) -> LanguageModel:
    """The model below all views."""
    while isinstance(lm, TargetView):
        lm = lm.lm
    return lm


def keeper(lm: LanguageModel) -> LanguageModel:
    """The model in whose cache the rows of a view lie."""
    return lm.base if isinstance(lm, TargetView) else lm
