"""Which tokens stay: top-k, top-p, min-p, bit for bit as in transformers, ties included.

On a CPU, sorting a vocabulary costs more than a small model's forward. The tokens near the best
one nearly always settle a cut alone; where rounding or a tie could decide, the full sort does.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

NEAR = 9.0  # logits this close to the best are tried first: a ratio of about 8000
DOUBT = 1e-5  # a nucleus whose boundary is this close to top_p is left to the full sort
SMALL = 256  # vocabularies up to here are simply sorted


def keep_top_k(scores: Float[Tensor, "*n V"], k: int) -> Float[Tensor, "*n V"]:
    """The k best tokens, and every token that ties with the last of them."""
    k = min(k, scores.shape[-1])
    if searched(scores):
        rows = scores.reshape(-1, scores.shape[-1])
        least = torch.stack([kth_best(row, k) for row in rows]).reshape(*scores.shape[:-1], 1)
    else:
        least = scores.topk(k)[0][..., -1:]
    return scores.masked_fill(scores < least, -math.inf)


def keep_min_p(scores: Float[Tensor, "*n V"], min_p: float) -> Float[Tensor, "*n V"]:
    """Tokens at least `min_p` times as likely as the best one; the best one always."""
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -math.inf)


def keep_top_p(scores: Float[Tensor, "*n V"], top_p: float) -> Float[Tensor, "*n V"]:
    """The nucleus: the fewest likely tokens whose mass reaches `top_p`."""
    rows = scores.reshape(-1, scores.shape[-1])
    if searched(scores):
        floors = [nucleus_floor(row, top_p) for row in rows]
        cut = [
            nucleus_from_full_sort(row[None], top_p)[0]
            if floor is None
            else row.masked_fill(row < floor, -math.inf)
            for row, floor in zip(rows, floors, strict=True)
        ]
        return torch.stack(cut).reshape(scores.shape)
    return nucleus_from_full_sort(rows, top_p).reshape(scores.shape)


def searched(scores: Tensor) -> bool:
    """Whether looking near the best token beats a sort: on a GPU it would only wait."""
    return scores.device.type == "cpu" and scores.shape[-1] > SMALL


def near_best(row: Float[Tensor, "V"]) -> Float[Tensor, "C"]:
    """The scores close to the best one."""
    return row[row >= row.amax() - NEAR]


def kth_best(row: Float[Tensor, "V"], k: int) -> Float[Tensor, ""]:
    """The k-th largest score."""
    near = near_best(row)
    return (near if len(near) >= k else row).topk(k)[0][-1]


def nucleus_from_full_sort(scores: Float[Tensor, "n V"], top_p: float) -> Float[Tensor, "n V"]:
    """The rule of transformers, operation for operation: it decides ties by its sort."""
    ordered, order = scores.sort(descending=False)
    remove = ordered.softmax(-1).cumsum(-1) <= (1 - top_p)
    remove[..., -1:] = False
    return scores.masked_fill(remove.scatter(1, order, remove), -math.inf)


def nucleus_floor(row: Float[Tensor, "V"], top_p: float) -> Float[Tensor, ""] | None:
    """The least score that stays, from the tokens near the best; None where they cannot tell.

    A token stays while the mass above it is less than `top_p`.
    """
    near = near_best(row).sort(descending=True)[0]
    if not len(near):  # every score is -inf or NaN: not for a shortcut to judge
        return None
    weight = (near - row.logsumexp(-1)).double().exp()
    mass = weight.cumsum(0)
    kept = int((mass - weight < top_p).sum())
    if abs(float(mass[kept - 1]) - top_p) < DOUBT or float(mass[kept - 1]) < top_p:
        return None
    if kept > 1 and abs(float(mass[kept - 2]) - top_p) < DOUBT:
        return None
    if kept < len(near) and bool(near[kept] == near[kept - 1]):
        return None
    return near[kept - 1]
