"""The likeliest few tokens of a long vocabulary, looked for in blocks."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
