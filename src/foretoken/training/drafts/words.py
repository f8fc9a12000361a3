"""Which tokens a draft scores: the most frequent of the target's own text."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from foretoken.training.dataset.records import Folders, read_told, shards


def mass(folder: Folders, vocab_size: int) -> Tensor:
    """How much of the target's laws falls on each token [V], beside how often it is read."""
    found = torch.zeros(vocab_size, dtype=torch.float64)
    for path in shards(folder, "train"):
        for chat, laws in read_told(path):
            found.index_add_(
                0, laws.tokens.flatten().long(), laws.log_probs.flatten().double().exp()
            )
            found.index_add_(
                0, torch.tensor(chat.prompt), torch.full((len(chat.prompt),), 0.05).double()
            )
    return found


def frequent(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` tokens with the most mass, in order of their ids; those of `always` among them."""
    counts = counts.clone()
    for token in always:
        counts[token] = torch.inf
    return counts.topk(min(size, len(counts)))[1].sort()[0]


def covered(counts: Tensor, tokens: Tensor) -> float:
    """The share of the mass that these tokens hold."""
    return float(counts[tokens].sum() / counts.sum())
