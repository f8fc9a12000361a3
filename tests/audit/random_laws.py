"""Pairs of laws for the tests of acceptance."""

from __future__ import annotations

import torch
from torch import Tensor


def whole_number_laws(vocab: int, count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Unrelated p and q in proportion to whole numbers from 1 to 9."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(1, 10, (count, 2, vocab), generator=generator).double()
    laws = numbers / numbers.sum(-1, keepdim=True)
    return [(p, q) for p, q in laws]


def laws_with_zeros(vocab: int, count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The same with tokens that are impossible under one of them; token 0 never is."""
    generator = torch.Generator().manual_seed(seed + 1)
    found = []
    for p, q in whole_number_laws(vocab, count, seed):
        holes = torch.randint(0, 3, (2, vocab), generator=generator) == 0
        holes[:, 0] = False
        p, q = p.masked_fill(holes[0], 0.0), q.masked_fill(holes[1], 0.0)
        found.append((p / p.sum(), q / q.sum()))
    return found
