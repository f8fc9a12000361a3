"""Norms and rotations of a captured model: in C for few tokens, by torch's operations for many."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.native.library import Call, evenly_apart, operation

FEW = 64  # tokens of a forward; beyond, torch shares the work out among threads


def rms_norm(states: Tensor, weight: Tensor, widened: Tensor, eps: float) -> Tensor:
    """x w / sqrt(mean(x x) + eps) over the last dimension; `widened` is (w, 0).

    torch has no fused kernel for it on a CPU: the layer norm of (x, -x), whose mean is zero, is
    one, and its sums are float32 in any type.
    """
    width = states.shape[-1]
    rows = states.numel() // width
    norm = operation("norm", states.dtype) if rows <= FEW and states.is_cpu else None
    if norm is None or weight.dtype is not states.dtype or width % 32:
        both = torch.cat((states, -states), -1)
        wide = torch.layer_norm(both, (2 * width,), widened, None, eps, False)
        return wide.narrow(-1, 0, width)
    return normed(norm, states, weight, eps)


def normed(norm: Call, states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same by the operation in C, where it can read states and weight."""
    states, apart = evenly_apart(states)
    made, width = states.new_empty(states.shape), states.shape[-1]
    rows = states.numel() // width
    norm(states.data_ptr(), weight.data_ptr(), made.data_ptr(), rows, width, apart, eps)
    return made


class Norm:
    """The forward of an RMS norm of torch's, with few rows in C: torch takes 130 us for a row or
    two of bfloat16 behind a forward.
    """

    __slots__ = ("module",)

    def __init__(self, module: nn.RMSNorm) -> None:
        self.module = module

    def __call__(self, states: Tensor) -> Tensor:
        module, width = self.module, states.shape[-1]
        rows, weight = states.numel() // width, module.weight
        norm = operation("norm", states.dtype) if rows <= FEW and states.is_cpu else None
        if (
            norm is None
            or weight is None
            or weight.dtype is not states.dtype
            or width % 32
            or states.requires_grad
        ):
            return F.rms_norm(states, module.normalized_shape, weight, module.eps)
        eps = torch.finfo(states.dtype).eps if module.eps is None else module.eps
        return normed(norm, states, weight, eps)


def rotated(states: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """x cos + (x with its halves swapped) sin; the first half of `sin` carries the sign."""
    *batch, heads, tokens, width = (1, *states.shape)[-4:]
    few = states.dim() == 4 and batch == [1] and tokens <= FEW and states.is_cpu
    rotate = operation("rotate", states.dtype) if few else None
    if (
        rotate is None
        or states.stride(3) != 1
        or cos.dtype is not states.dtype
        or sin.dtype is not states.dtype
        or cos.shape[-2:] != (tokens, width)
        or cos.numel() != tokens * width
        or not (cos.is_contiguous() and sin.is_contiguous())
    ):
        return torch.addcmul(states * cos, torch.roll(states, half, -1), sin)
    made = states.new_empty(states.shape)
    rotate(
        states.data_ptr(), cos.data_ptr(), sin.data_ptr(), made.data_ptr(),
        heads, tokens, width, states.stride(1), states.stride(2), width,
    )  # fmt: skip
    return made
