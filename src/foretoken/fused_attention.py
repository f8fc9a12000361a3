"""torch's fused attention, on a GPU without cuDNN's kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ALLOWED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fused_attention(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    """`scaled_dot_product_attention`, with its options.

    torch prefers cuDNN on Hopper and later, which plans anew for every shape, for tens of
    milliseconds and more; and the columns of a text are others at every token.
    """
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value, **how)
    with sdpa_kernel(ALLOWED):
        return F.scaled_dot_product_attention(query, key, value, **how)
