"""The likeliest few tokens of a long vocabulary, looked for in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.native.best_columns import largest_columns

BLOCK = 256  # tokens
MANY = 4  # blocks per token asked for from which blocks are faster than a search through all


def likeliest(
    scores: Float[Tensor, "n V"], count: int
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """Scores and ids of the `count` largest of every row, the largest first.

    They lie in the blocks whose largest scores are largest, and only these are searched.
    """
    vocab = scores.shape[-1]
    blocks, rest = divmod(vocab, BLOCK)
    if not scores.is_cpu or blocks < MANY * count:
        values, ids = scores.topk(count)
        return values, ids
    whole = scores[:, : vocab - rest].reshape(-1, blocks, BLOCK)
    best = whole.amax(-1).topk(count, sorted=False).indices
    ids = (best[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    if rest:
        ids = torch.cat([ids, torch.arange(vocab - rest, vocab).expand(len(ids), rest)], 1)
    values, found = scores.gather(1, ids).topk(count)
    return values, ids.gather(1, found)


def followers(
    scores: Float[Tensor, "n V"], count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The ids of the `count` largest of every row, the largest first, and the share of each in the
    softmax of these alone. Nothing has a share where the largest is no finite number."""
    found = largest_columns(scores, count)
    if found is None:
        values, best = likeliest(scores, count)
        found = best.tolist(), values.tolist()
    ids, listed = found
    return ids, [shares(row) for row in listed]


def shares(scores: Sequence[float]) -> list[float]:
    """The softmax of descending scores; of none that is finite no share is left."""
    top = scores[0]
    if not -inf < top < inf:
        return [0.0] * len(scores)
    weights = [exp(score - top) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]
