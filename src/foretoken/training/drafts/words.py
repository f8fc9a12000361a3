"""Which tokens a draft scores: the most frequent of the target's own text."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from foretoken.training.dataset.records import TEXT, Folders, read_told, shards

READ = 0.05  # what a token counts that the target only reads


def mass(folder: Folders, vocab_size: int) -> Tensor:
    """How much of the target's laws falls on each token [V], beside how often it is read."""
    found = torch.zeros(vocab_size, dtype=torch.float64)
    for path in shards(folder, "train"):
        for chat, laws in read_told(path):
            tokens, probs = laws.tokens.flatten().long(), laws.log_probs.flatten().double().exp()
            if not len(tokens):  # no laws were kept
                tokens = torch.tensor(chat.answer)
                probs = torch.ones(len(tokens), dtype=torch.float64)
            found.index_add_(0, tokens, probs * (READ if chat.kind == TEXT else 1.0))
            read = torch.full((len(chat.prompt),), READ, dtype=torch.float64)
            found.index_add_(0, torch.tensor(chat.prompt), read)
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
