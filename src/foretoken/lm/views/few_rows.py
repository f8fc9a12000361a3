"""A draft of which some rows of the output layer are computed, as a model of the target's width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.views.view import TargetView
from foretoken.trees.growing import Grown, GrowthRule, grows_trees
from foretoken.types import Draft, Ragged, Rows, SamplingParams, Scores, Taps


class FewRows(TargetView):
    """Laws of `lm`, whose first logits are those of `rows`, over all tokens of the target.

    `follow(full)` lets the rows follow their weights, which are those of the model `whole`.
    """

    def __init__(
        self,
        lm: LanguageModel,
        rows: OutputRows,
        follow: Callable[[bool], None] | None = None,
        whole: Any = None,
    ) -> None:
        super().__init__(lm)
        self.output_rows, self.follow, self.whole = rows, follow, whole
        self.vocab_size = rows.width

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        return [self.spread(score) for score in self.lm.score(rows, drafts, taps)]

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        return [self.spread(score) for score in self.lm.grow(rows, tokens, parents, taps)]

    def grow_trees(
        self, rows: Rows, rules: Sequence[GrowthRule], names: Int[Tensor, "n"] | None = None
    ) -> list[Grown | None]:
        lm, own = self.lm, self.output_rows.tokens
        return lm.grow_trees(rows, rules, own) if grows_trees(lm) else [None] * len(rows)

    def unembed(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        return self.output_rows.spread(self.lm.unembed(hidden)[:, : len(self.output_rows)])

    def spread(self, score: Scores) -> Scores:
        """Over all tokens of the target, where anyone asks for them."""
        few = self.output_rows.few(score.logits[:, : len(self.output_rows)])
        return Scores(few, score.hidden, score.p, score.share)

    def refresh(self, full: bool = False) -> int:
        """Follow changed weights, those of the whole output layer among them."""
        if self.follow is not None:
            self.follow(full)
        changed: int = self.base.refresh(full=full)
        return changed


def is_silenced(lm: Any, params: SamplingParams) -> bool:
    """Whether a text's options ban every token that a draft scores: it has no law then."""
    rows = getattr(lm, "output_rows", None)  # of views that score few tokens alone
    if rows is None or not (params.banned_tokens or params.logit_bias):
        return False
    banned = params.banned_tokens | {t for t, bias in params.logit_bias.items() if bias == -inf}
    silenced: bool = banned.issuperset(rows.tokens.tolist())
    return silenced
