"""Which tokens stay: top-k, top-p, min-p, bit for bit as in transformers, ties included.

On a CPU, sorting a vocabulary costs more than a small model's forward. The few likeliest tokens
nearly always settle a nucleus; where rounding or a tie could decide, the full sort does.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

CANDIDATES = (64, 512)  # likeliest tokens looked at before a full sort
DOUBT = 1e-5  # a nucleus whose boundary is this close to top_p is left to the full sort


def keep_top_k(scores: Float[Tensor, "*n V"], k: int) -> Float[Tensor, "*n V"]:
    """The k best tokens, and every token that ties with the last of them."""
    least = scores.topk(min(k, scores.shape[-1]))[0][..., -1:]
    return scores.masked_fill(scores < least, -math.inf)


def keep_min_p(scores: Float[Tensor, "*n V"], min_p: float) -> Float[Tensor, "*n V"]:
    """Tokens at least `min_p` times as likely as the best one; the best one always."""
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -math.inf)


def keep_top_p(scores: Float[Tensor, "*n V"], top_p: float) -> Float[Tensor, "*n V"]:
    """The nucleus: the fewest likely tokens whose mass reaches `top_p`."""
    rows = scores.reshape(-1, scores.shape[-1])
    if rows.device.type == "cpu":  # on a GPU the sort is cheaper than asking what is settled
        cut = nucleus_from_candidates(rows, top_p)
    else:
        cut = nucleus_from_full_sort(rows, top_p)
    return cut.reshape(scores.shape)


def nucleus_from_full_sort(scores: Float[Tensor, "n V"], top_p: float) -> Float[Tensor, "n V"]:
    """The rule of transformers, operation for operation: it decides ties by its sort."""
    ordered, order = scores.sort(descending=False)
    remove = ordered.softmax(-1).cumsum(-1) <= (1 - top_p)
    remove[..., -1:] = False
    return scores.masked_fill(remove.scatter(1, order, remove), -math.inf)


def nucleus_from_candidates(scores: Float[Tensor, "n V"], top_p: float) -> Float[Tensor, "n V"]:
    """The same nucleus, sorting the vocabulary only for rows that few tokens cannot settle."""
    probs = scores.softmax(-1)
    floors = torch.zeros(len(scores), 1, dtype=scores.dtype)
    left = list(range(len(scores)))  # rows not settled yet
    for candidates in CANDIDATES:
        if not left or scores.shape[-1] < 4 * candidates:
            break
        whole = len(left) == len(scores)
        floor, settled = nucleus_floor(probs if whole else probs[left], top_p, candidates)
        floors[left] = floor
        left = [row for row, done in zip(left, settled.tolist(), strict=True) if not done]
    cut = scores.masked_fill(probs < floors, -math.inf)
    if left:
        cut[left] = nucleus_from_full_sort(scores[left], top_p)
    return cut


def nucleus_floor(
    probs: Float[Tensor, "n V"], top_p: float, candidates: int
) -> tuple[Float[Tensor, "n 1"], Bool[Tensor, "n"]]:
    """The least probability that stays in each row, and whether that is beyond doubt.

    A token stays while the mass above it is less than `top_p`.
    """
    best = probs.topk(candidates)[0]  # [n, C]
    mass = best.double().cumsum(-1)
    above = mass - best
    # Chances that are no numbers are less than nothing: they are told where a token is chosen.
    kept = (above < top_p).sum(-1, keepdim=True).clamp(min=1)  # [n, 1]
    floor = best.gather(-1, kept - 1)
    # All candidates stay: perhaps others do. The first to go ties with the last to stay: which
    # goes is up to the sort.
    following = best.gather(-1, kept.clamp(max=candidates - 1))
    unsure = (kept == candidates) | (following == floor)
    unsure |= ((above - top_p).abs() < DOUBT).any(-1, keepdim=True)
    return floor, ~unsure[:, 0]
