"""The cache against a fresh recompute: what the target says of every node, said again from nothing.

A misplaced column, a wrong position or a sibling seen through the mask changes logits long before
it changes a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.audit.greedy import ROUNDING, fresh_logits
from foretoken.audit.rows import Build, Guesses, seeded_rows, write
from foretoken.contract import LanguageModel
from foretoken.lm.views.view import TargetView
from foretoken.types import DecodeState, Draft, Ragged, Rows, SamplingParams, Scores, Taps


@dataclass(slots=True)
class Difference:
    """The largest disagreement so far, as a share of the largest logit, and where it was."""

    relative: float = 0.0
    bound: float = 0.0
    where: str = ""
    nodes: int = 0  # compared
    guesses: Guesses = field(default_factory=Guesses)

    @property
    def good(self) -> bool:
        return self.nodes > 0 and self.relative <= self.bound


class Witness(TargetView):
    """A target that recomputes every node it is asked about without its cache, and remembers."""

    def __init__(self, inner: LanguageModel) -> None:
        super().__init__(inner)
        self.inner = inner
        self.difference = Difference()

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        scores = self.inner.score(rows, drafts, taps)
        for row, draft, score in zip(rows, drafts, scores, strict=True):
            for node in range(len(draft.tree)):
                path = [draft.tree.tokens[i] for i in draft.tree.path(node)]
                fresh = fresh_logits(self.inner, [*row.tokens, *path])
                self.compare(score.logits[node], fresh, row, node)
        return scores

    def compare(self, cached: Tensor, fresh: Tensor, row: DecodeState, node: int) -> None:
        """Keep the worst node; rounding grows with the logits, so it is measured against them."""
        scale = float(fresh.double().abs().max()) or 1.0
        relative = float((cached.double() - fresh.double()).abs().max()) / scale
        seen = self.difference
        seen.nodes += 1
        seen.bound = ROUNDING[fresh.dtype]
        if relative != relative:  # NaN
            relative = float("inf")
        if relative > seen.relative:
            seen.relative = relative
            seen.where = f"node {node} after {len(row.tokens)} tokens"


@torch.inference_mode()
def cache_difference(
    build: Build, prompts: Ragged, tokens: int, temperature: float = 1.0
) -> Difference:
    """Decode a ragged batch while every scored node is recomputed from nothing."""
    engine = build()
    witness = Witness(engine.target)
    engine.target = witness
    engine.listeners.append(witness.difference.guesses)
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature)
    write(engine, seeded_rows(prompts, params, witness.vocab_size))
    return witness.difference
