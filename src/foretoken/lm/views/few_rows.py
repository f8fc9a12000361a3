"""A draft of which some rows of the output layer are computed, as a model of the target's width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from math import inf
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.views.view import TargetView
from foretoken.trees.growing import Grown, GrowthRule, grows_trees
from foretoken.types import DecodeState, Draft, Ragged, Rows, SamplingParams, Scores, Taps


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


class NarrowRows(FewRows):
    """Of a draft whose ids are the first `known` ones of the target.

    The others are read as id 0: the draft's table has no rows for them.
    """

    def __init__(self, *few_rows: Any, known: int) -> None:
        super().__init__(*few_rows)
        self.known = known

    def prefill(
        self, rows: Rows, taps: Taps = (), *, limit: int | None = None, last: int | None = None
    ) -> list[Float[Tensor, "S L H"] | None]:
        return self.lm.prefill([*map(self.read, rows)], taps, limit=limit, last=last)

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        trees = [draft.tree for draft in drafts]
        return self.grow(rows, [t.tokens for t in trees], [t.parents for t in trees], taps)

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        fed = [*map(self.fed, tokens)]
        return super().grow([*map(self.read, rows)], fed, parents, taps)

    def grow_trees(
        self, rows: Rows, rules: Sequence[GrowthRule], names: Int[Tensor, "n"] | None = None
    ) -> list[Grown | None]:
        return super().grow_trees([*map(self.read, rows)], rules, names)

    def self_check(self, row: DecodeState) -> None:
        self.lm.self_check(self.told(row))  # which reads the text from its beginning

    def embed(self, tokens: Sequence[int]) -> Float[Tensor, "n H"]:
        return self.lm.embed(self.fed(tokens))

    def fed(self, tokens: Sequence[int]) -> list[int]:
        return [token if token < self.known else 0 for token in tokens]

    def read(self, row: DecodeState) -> DecodeState:
        """The row, told in ids of the draft if any that it still has to be fed is none."""
        unread = row.tokens[-1 - max(0, self.lm.missing(row)) :]
        return row if max(unread) < self.known else self.told(row)

    def told(self, row: DecodeState) -> DecodeState:
        """The same row to the draft, by its uid, in ids that it knows."""
        told = copy(row)
        told.tokens = self.fed(row.tokens)
        return told


def is_silenced(lm: Any, params: SamplingParams) -> bool:
    """Whether a text's options ban every token that a draft scores: it has no law then."""
    rows = getattr(lm, "output_rows", None)  # of views that score few tokens alone
    if rows is None or not (params.banned_tokens or params.logit_bias):
        return False
    banned = params.banned_tokens | {t for t, bias in params.logit_bias.items() if bias == -inf}
    silenced: bool = banned.issuperset(rows.tokens.tolist())
    return silenced
