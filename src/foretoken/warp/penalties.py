"""Penalties on used tokens, applied in place to many rows that share a history.

Each row is a node of a tree: what was written before is the same for all, the path differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretoken.warp.history import Used

Cells = list[tuple[int, int, float]]  # row, token, amount


def place(scores: Tensor, cells: Cells, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change single cells of `scores` [n, V] in place; tokens outside the vocabulary are left."""
    size = scores.shape[-1]
    cells = [cell for cell in cells if cell[1] < size]
    if not cells:
        return
    rows, tokens, amounts = zip(*cells, strict=True)
    index = torch.tensor([rows, tokens], dtype=torch.long, device=scores.device)
    amount = torch.tensor(amounts, dtype=scores.dtype, device=scores.device)
    at = (index[0], index[1])
    scores[at] = change(scores[at], amount)


def penalise_repetition(
    scores: Tensor, seen: Used, paths: Sequence[Sequence[int]], penalty: float
) -> None:
    """CTRL's repetition penalty, in place: scores of seen tokens move away from likely."""

    def change(old: Tensor, _: Tensor | None = None) -> Tensor:
        return torch.where(old < 0, old * penalty, old / penalty)

    index = seen.tokens
    index = index[index < scores.shape[-1]].to(scores.device)
    if len(index):
        scores[:, index] = change(scores[:, index])
    fresh = [(row, t, 0.0) for row, path in enumerate(paths) for t in set(path) if t not in seen]
    place(scores, fresh, change)


def penalise_counts(
    scores: Tensor,
    said: Used,
    paths: Sequence[Sequence[int]],
    presence: float,
    frequency: float,
) -> None:
    """The OpenAI interface's penalties, in place: once per used token, and once per use."""
    fits = said.tokens < scores.shape[-1]
    index = said.tokens[fits].to(scores.device)
    if len(index):
        amount = presence + frequency * said.counts[fits].double()  # rounded once, to scores
        scores[:, index] -= amount.to(scores.dtype).to(scores.device)
    more = [
        (row, token, frequency * uses + (0.0 if token in said else presence))
        for row, path in enumerate(paths)
        for token, uses in Counter(path).items()
    ]
    place(scores, more, lambda old, amount: old - amount)
