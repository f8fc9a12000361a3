"""Attention whose bits do not depend on how many tokens are scored together.

Sums over keys are made block by block of *logical positions*, so that a token sees the same sums
in the same order whether the tokens before it were cached long ago or sit beside it in a tree,
among columns that it does not see. Two properties of matrix products carry this, and both are
probed at load (`bits_probe`): rows do not depend on how many rows there are, from some count
on, and a product over few columns adds them up in order, so that zero columns change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from foretoken.errors import CapabilityError
from foretoken.lm.runtime.packing import Feed

NAME = "foretoken-exact"
LEAST = 16  # rows and columns a product is padded to: below, libraries switch kernels by size
SPANS = (384, 192, 96)  # how many columns a library may add up before it splits a sum


@dataclass(frozen=True, slots=True)
class Span:
    """How the keys are cut: blocks of positions, and how far a tree may push columns apart."""

    block: int
    reach: int  # a column lies at most this much right of its position

    @classmethod
    def of(cls, unsplit: int) -> Span:
        """Two thirds for the block, the rest for the tree."""
        block = unsplit * 2 // 3
        return cls(block, unsplit - block)

    def order_of(self, feeds: Sequence[Feed], positions: Int[Tensor, "B K"]) -> Order:
        """The order of a forward over `feeds`, whose columns hold tokens at `positions`."""
        pushed = max(
            feed.base + i - position
            for feed in feeds
            for i, position in enumerate(feed.key_positions)
        )
        plain = positions.shape[1] if pushed == 0 else min(feed.base for feed in feeds)
        return Order.of(self, positions, plain, pushed)


@dataclass(frozen=True, slots=True)
class Order:
    """The blocks of one forward: columns that hold them, and which of these belong (None: all)."""

    pieces: tuple[tuple[int, int, Tensor | None], ...]

    @classmethod
    def of(cls, span: Span, positions: Int[Tensor, "B K"], plain: int, pushed: int) -> Order:
        """`plain`: columns up to which every row's column is its position; `pushed`: how far apart
        the two are at most behind that."""
        columns = positions.shape[1]
        if pushed > span.reach:
            raise CapabilityError(
                f"a tree that moves a token {pushed} columns from its position was scored with "
                "exact_bits=True.",
                f"sums on this machine keep their order over trees of {span.reach + 1} nodes.",
                f"draft at most {span.reach} nodes, or drop exact_bits.",
            )
        pieces: list[tuple[int, int, Tensor | None]] = []
        blocks = positions // span.block
        for index in range(-(-columns // span.block)):
            start = index * span.block
            if start + span.block <= plain:
                pieces.append((start, start + span.block, None))
                continue
            stop = min(columns, start + span.block + pushed)
            inside = (blocks[:, start:stop] == index)[:, None, None]
            pieces.append((start, stop, inside.float()))
        return cls(tuple(pieces))


def attend_in_order(
    module: torch.nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, KV, K, D]
    value: Tensor,  # [B, KV, K, D of values]
    attention_mask: Tensor,  # [B, 1, Q, K], additive
    scaling: float | None = None,
    order: Order | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(query key^T scaling) value, every sum over keys in the order of positions."""
    if order is None or softcap is not None or s_aux is not None:
        raise CapabilityError(
            "exact_bits=True was asked for a model with soft-capped scores or attention sinks.",
            "the ordered attention has neither.",
            "load the model without exact_bits.",
        )
    batch, heads, queries, width = query.shape
    groups, columns = key.shape[1:3]
    rows = heads // groups * queries
    scale = width**-0.5 if scaling is None else scaling
    folded = padded_rows((query * scale).reshape(batch, groups, rows, width))
    if columns < LEAST:  # the columns added are cut off again, or hold zero weights
        key, value = (F.pad(states, (0, 0, 0, LEAST - columns)) for states in (key, value))
    scores = (folded @ key.transpose(-1, -2))[:, :, :rows, :columns]
    scores = scores + attention_mask.repeat(1, 1, heads // groups, 1)
    weights = padded_rows((scores - scores.amax(-1, keepdim=True)).exp())
    mixed, total = weighted_sums(weights, value, order)
    mixed = (mixed / total)[:, :, :rows].reshape(batch, heads, queries, -1)
    return mixed.transpose(1, 2).contiguous(), None


def weighted_sums(weights: Tensor, value: Tensor, order: Order) -> tuple[Tensor, Tensor]:
    """Sums of weights times values and of weights, block after block."""
    mixed = total = None
    ones = value.new_ones(max(stop - start for start, stop, _ in order.pieces), LEAST)
    for start, stop, inside in order.pieces:
        part = weights[..., start:stop]
        part = part if inside is None else part * inside
        held = part @ value[:, :, start:stop]
        # as a product, since a sum over a dimension adds in an order that depends on its length
        held_total = part @ ones[: stop - start]
        mixed = held if mixed is None else mixed + held
        total = held_total if total is None else total + held_total
    assert mixed is not None and total is not None
    return mixed, total[..., :1]


def padded_rows(states: Tensor) -> Tensor:
    """At least LEAST rows, the new ones zero."""
    missing = LEAST - states.shape[2]
    return F.pad(states, (0, 0, 0, missing)) if missing > 0 else states


AttentionInterface.register(NAME, attend_in_order)
AttentionMaskInterface.register(NAME, eager_mask)
