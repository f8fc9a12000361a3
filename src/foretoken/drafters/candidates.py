"""Likely next tokens, as the draft model sees them: where SpecEE gets its few candidates from.

A source of its own, so that another (a head on the target's features) can take its place: it gives
a chain of guesses and, for every node of that chain, the K tokens most likely to follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from foretoken.types import DecodeState, LanguageModel


@dataclass(frozen=True, slots=True)
class Guess:
    """A chain, root left out, and the candidates of the root and each of its tokens."""

    tokens: tuple[int, ...]
    candidates: Int[Tensor, "N K"]


class DraftCandidates:
    """One draft forward per node: the root's, and one for each token of the chain."""

    def __init__(self, draft: LanguageModel, count: int) -> None:
        self.lm, self.count = draft, count
        self.open: set[int] = set()  # rows with an open tree in the draft model

    def start(self, row: DecodeState) -> None:
        if self.lm.max_length is None or len(row.tokens) <= self.lm.max_length:
            self.lm.prefill(row)

    def fits(self, row: DecodeState, length: int) -> bool:
        """Whether the draft model has positions for that many tokens more."""
        return self.lm.max_length is None or len(row.tokens) + length <= self.lm.max_length

    def guess(self, rows: Sequence[DecodeState], lengths: Sequence[int]) -> list[Guess]:
        """Chains of these lengths, each token the draft's most likely one."""
        feeds = [[row.tokens[-1]] for row in rows]
        found: list[list[Tensor]] = [[] for _ in rows]
        for depth in range(max(lengths, default=-1) + 1):
            active = [i for i, length in enumerate(lengths) if length >= depth]
            logits = self.lm.grow(
                [rows[i] for i in active],
                [feeds[i][-1:] for i in active],
                [(depth - 1,)] * len(active),
            )
            for i, scored in zip(active, logits, strict=True):
                best = scored[0].topk(self.count).indices
                found[i].append(best)
                feeds[i].append(int(best[0]))
        self.open.update(row.uid for row in rows)
        return [
            Guess(tuple(feed[1 : length + 1]), torch.stack(best))
            for feed, length, best in zip(feeds, lengths, found, strict=True)
        ]

    def commit(self, rows: Sequence[DecodeState], paths: Sequence[Sequence[int]]) -> None:
        """Keep what was accepted, for rows that were guessed for."""
        pairs = [(r, p) for r, p in zip(rows, paths, strict=True) if r.uid in self.open]
        self.open.difference_update(row.uid for row, _ in pairs)
        if pairs:
            self.lm.commit([row for row, _ in pairs], [path for _, path in pairs])

    def free(self, row: DecodeState) -> None:
        self.open.discard(row.uid)
        self.lm.free([row])
