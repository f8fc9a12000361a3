"""Hybrid tree attention: the cached prefix without a mask, the tree with its own, merged.

All new tokens of a forward see the whole committed prefix, so a mask over it says nothing and is
only read. The prefix is attended to by torch's fused kernel, which also gives the log-sum-exp of
the scores, as is the short rest under its mask; both are weighted by their log-sum-exps. LongSpec,
P. Yang et al., 2025, arXiv 2502.17421, "hybrid tree attention".
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

# Bytes of one head's keys and values in the prefix from which on it pays to read it in pieces and
# without a mask, as benchmarks/tree_attention.py found: 4,096 columns of 64 numbers in float32,
# 16,384 in bfloat16, where torch's arithmetic takes so long that the mask matters little. Types
# that were not measured keep one mask.
LARGE = {torch.float32: 2 << 20, torch.bfloat16: 4 << 20}
PIECE = 1 << 19  # and of one piece, which stays beside the processor for all queries

Mixed = tuple[Tensor, Tensor]  # [B, KV, R, D] and its log-sum-exps [B, KV, R], of scaled scores


def pays(query: Tensor, key: Tensor, value: Tensor, prefix: int) -> bool:
    """Whether the hybrid is the faster way, and can be had: torch's CPU kernel wants one width."""
    large = LARGE.get(query.dtype)
    if large is None or query.device.type != "cpu" or key.shape[3] != value.shape[3]:
        return False
    return prefix > 0 and large <= 2 * prefix * key.shape[3] * key.element_size()


def hybrid(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B KV K D"],
    value: Float[Tensor, "B KV K D"],
    mask: Float[Tensor, "B|1 1 rows K"] | None,  # additive; Q rows, or folded beforehand
    prefix: int,
    scaling: float | None = None,
) -> Float[Tensor, "B H Q D"]:
    """Attention under `mask`, of which the first `prefix` columns are not read: all see these.

    Either side may be empty, and without a mask the rest is seen by all as well. Equal to attention
    under one mask over all columns, up to the rounding of sums.
    """
    batch, heads, queries, _ = query.shape
    fold = heads // key.shape[1]
    rows = query.reshape(batch, key.shape[1], fold * queries, -1)
    count, each = pieces(key, prefix)
    whole = count * each
    seen = rest = None
    if whole:
        seen = over_pieces(rows, key[:, :, :whole], value[:, :, :whole], count, scaling)
    if whole < key.shape[2]:
        behind = None if mask is None else of_rows(mask[..., whole:], queries, fold)
        rest = fused(rows, key[:, :, whole:], value[:, :, whole:], behind, scaling)
    return merged(seen, rest).to(query.dtype).reshape(batch, heads, queries, -1)


def of_rows(mask: Tensor, queries: int, fold: int) -> Tensor:
    """The mask of rows that are `fold` heads of `queries` tokens, however it was folded before."""
    if mask.shape[-2] == fold * queries:
        return mask
    return mask[:, :, :queries].repeat(1, 1, fold, 1)


def merged(first: Mixed | None, second: Mixed | None) -> Tensor:
    """Attention over both sets of columns, in float32; None is a set without columns.

    The share of the first is a sigmoid of the difference of log-sum-exps, which cannot overflow.
    """
    if first is None or second is None:
        one = first or second
        assert one is not None, "attention over no columns"
        return one[0]
    share = torch.sigmoid(first[1].float() - second[1].float())[..., None]
    return torch.lerp(second[0].float(), first[0].float(), share)


def pieces(key: Tensor, prefix: int) -> tuple[int, int]:
    """How many pieces the prefix is read in, and their columns; what is left is under the mask.

    The kernel reads keys and values once per 32 queries: a piece is still in the cache by then.
    Only a lone row can be cut without copying it.
    """
    if prefix <= 0:
        return 0, 0
    count = 1
    if key.shape[0] == 1:
        count = max(1, 2 * prefix * key.shape[3] * key.element_size() // PIECE)
    return count, prefix // count


def over_pieces(
    query: Tensor, key: Tensor, value: Tensor, count: int, scaling: float | None
) -> Mixed:
    """Attention over all columns, `count` pieces of them as rows of one batch."""
    if count == 1:
        return fused(query, key, value, None, scaling)
    rows = query.expand(count, -1, -1, -1), cut(key, count), cut(value, count)
    parts, sums = fused(*rows, None, scaling)
    whole = sums.logsumexp(0, keepdim=True)
    share = (sums - whole).exp()[..., None]
    return (parts.float() * share).sum(0, keepdim=True), whole


def cut(states: Tensor, count: int) -> Tensor:
    """[1, KV, K, D] as [count, KV, K / count, D], in place."""
    _, groups, columns, width = states.shape
    _, group, column, number = states.stride()
    each = columns // count
    shape, steps = (count, groups, each, width), (each * column, group, column, number)
    return states.as_strided(shape, steps, states.storage_offset())


def fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Mixed:
    """torch's fused attention, with log-sum-exps in float32."""
    mixed, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=scaling
    )
    return mixed, sums
