"""Parallel heads as a block model: all depths from one hidden state of the target.

The state is the one behind which the row's last token was said, so it came with the target's own
scores: guessing costs no forward of a model, and there is no KV cache to follow the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.trained_head import HeadOptions, TrainedHead
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.views.few_rows import is_silenced
from foretoken.types import DecodeState, Rows


class ParallelHeads(TrainedHead):
    """Laws of the next places by a module that maps states [n H] to logits [n depth k]."""

    context: int | None = 1

    def __init__(self, target: LanguageModel, kind: str, config: HeadOptions | None = None) -> None:
        super().__init__(target, kind, config)
        self.depth: int = self.head.depth
        ids = self.head.scored
        self.output_rows = OutputRows(torch.arange(len(ids)).to(ids), ids, target.vocab_size)

    def open(self, row: DecodeState, features: Features | None) -> bool:
        if is_silenced(self, row.params):
            return False
        if features is not None and len(features):  # nothing was said before a single token
            row.private[self] = features[-1, 0]
        return True

    @torch.inference_mode()
    def laws(self, rows: Rows, depth: int) -> list[Float[Tensor, "depth V"]]:
        """Logits of the tokens behind each row's last one; none where no state is known yet."""
        states = [row.private.get(self) for row in rows]
        known = [state for state in states if state is not None]
        none = torch.zeros(0, self.vocab_size)
        if not known:
            return [none] * len(rows)
        said = iter(self.head(torch.stack(known).to(self.like))[:, :depth])
        spread = self.output_rows.spread
        return [none if state is None else spread(next(said)) for state in states]

    def keep(self, rows: Rows, features: Sequence[Features | None]) -> None:
        for row, seen in zip(rows, features, strict=True):
            assert seen is not None, "features come with every verdict"
            row.private[self] = seen[-1, 0].clone()
