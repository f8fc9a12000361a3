"""The cache against a fresh recompute: what the target says of every node, said again from nothing.

A misplaced column, a wrong position or a sibling seen through the mask changes logits long before
it changes a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.audit.greedy import ROUNDING, fresh_logits
from foretoken.audit.rows import Build, seeded_rows, write
from foretoken.types import DecodeState, Draft, LanguageModel, SamplingParams, Scores


@dataclass(slots=True)
class Difference:
    """The largest disagreement so far, as a share of the largest logit, and where it was."""

    relative: float = 0.0
    bound: float = 0.0
    where: str = ""
    nodes: int = 0  # compared

    @property
    def good(self) -> bool:
        return self.nodes > 0 and self.relative <= self.bound


class Witness:
    """A target that recomputes every node it is asked about without its cache, and remembers."""

    def __init__(self, inner: LanguageModel) -> None:
        self.inner = inner
        self.caps, self.vocab_size, self.max_length = inner.caps, inner.vocab_size, inner.max_length
        self.hidden_size = inner.hidden_size
        self.difference = Difference()

    def prefill(self, row: DecodeState, taps: tuple[int, ...] = ()) -> Tensor | None:
        return self.inner.prefill(row, taps)

    def score(
        self, rows: Sequence[DecodeState], drafts: Sequence[Draft], taps: tuple[int, ...] = ()
    ) -> list[Scores]:
        scores = self.inner.score(rows, drafts, taps)
        for row, draft, score in zip(rows, drafts, scores, strict=True):
            for node in range(len(draft.tree)):
                path = [draft.tree.tokens[i] for i in draft.tree.path(node)]
                fresh = fresh_logits(self.inner, [*row.tokens, *path])
                self.compare(score.logits[node], fresh, row, node)
        return scores

    def grow(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        return self.inner.grow(rows, tokens, parents)

    def grow_scores(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        taps: tuple[int, ...],
    ) -> list[Scores]:
        return self.inner.grow_scores(rows, tokens, parents, taps)

    def commit(self, rows: Sequence[DecodeState], paths: Sequence[Sequence[int]]) -> None:
        self.inner.commit(rows, paths)

    def free(self, rows: Sequence[DecodeState]) -> None:
        self.inner.free(rows)

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
    build: Build, prompts: Sequence[Sequence[int]], tokens: int, temperature: float = 1.0
) -> Difference:
    """Decode a ragged batch while every scored node is recomputed from nothing."""
    engine = build()
    witness = Witness(engine.target)
    engine.target = witness
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature)
    write(engine, seeded_rows(prompts, params, witness.vocab_size))
    return witness.difference
