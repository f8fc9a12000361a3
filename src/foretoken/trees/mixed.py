"""The greedy multi-draft rule's candidates (Hu et al., arXiv 2502.18779): the best of q, one draw.

Its contract (`Draw.MIXED`): one child of a node may be sampled, from the law stored for the node;
the others are fixed, and that law is zero on them. So a child's chance under the stored law says
which kind it is, and no order has to be agreed on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.warp.residual import without


def best_and_rest(q: Float[Tensor, "V"], count: int) -> tuple[list[int], Float[Tensor, "V"]]:
    """The `count` likeliest tokens of q, and q on all others; all zero when none is left to draw.

    Tokens that q thinks impossible are never among them, so there may be fewer.
    """
    found = q.topk(min(max(count, 0), q.shape[0]))
    pairs = zip(*map(Tensor.tolist, found), strict=True)
    best = [int(token) for chance, token in pairs if chance > 0.0]
    rest = without(q, best)
    return best, torch.zeros_like(q) if rest is None else rest


def sampled_and_fixed(
    tokens: Sequence[int], children: Sequence[int], q: Float[Tensor, "V"]
) -> tuple[int | None, list[int]]:
    """The child of a node that was drawn from its stored law, if any, and the fixed ones."""
    chances = q[[tokens[child] for child in children]].tolist()
    drawn = [child for child, chance in zip(children, chances, strict=True) if chance > 0.0]
    assert len(drawn) <= 1, "the stored law of mixed children is zero on all but one of them"
    return (drawn[0] if drawn else None), [child for child in children if child not in drawn]
