"""Penalties on used tokens, applied in place to many rows that share a history.

Each row is a node of a tree: what was written before is the same for all, the path differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

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
    scores: Tensor, seen: AbstractSet[int], paths: Sequence[Sequence[int]], penalty: float
) -> None:
    """CTRL's repetition penalty, in place: scores of seen tokens move away from likely."""

    def change(old: Tensor, _: Tensor | None = None) -> Tensor:
        return torch.where(old < 0, old * penalty, old / penalty)

    index = torch.tensor([t for t in seen if t < scores.shape[-1]], device=scores.device)
    if len(index):
        scores[:, index] = change(scores[:, index])
    fresh = [(row, t, 0.0) for row, path in enumerate(paths) for t in set(path) - seen]
    place(scores, fresh, change)


def penalise_counts(
    scores: Tensor,
    counts: Mapping[int, int],
    paths: Sequence[Sequence[int]],
    presence: float,
    frequency: float,
) -> None:
    """The OpenAI interface's penalties, in place: once per used token, and once per use."""
    used = [(token, count) for token, count in counts.items() if token < scores.shape[-1]]
    if used:
        index = torch.tensor([token for token, _ in used], device=scores.device)
        amount = [presence + frequency * count for _, count in used]
        scores[:, index] -= torch.tensor(amount, dtype=scores.dtype, device=scores.device)
    more = [
        (row, token, frequency * uses + (0.0 if token in counts else presence))
        for row, path in enumerate(paths)
        for token, uses in Counter(path).items()
    ]
    place(scores, more, lambda old, amount: old - amount)
