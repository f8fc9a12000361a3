"""Laws of logits, and draws from them: in C, one pass where torch's operations make several."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof, c_double, c_int64

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.native.library import Call, over_columns

LEAST = torch.finfo(torch.float32).tiny  # scale of logits: less would be zero, times -inf no number


def softmax(
    logits: Float[Tensor, "*n V"],
    temperature: float = 1.0,
    names: Int[Tensor, "V"] | None = None,
    width: int | None = None,
) -> Float[Tensor, "*n W"]:
    """exp(logits / temperature) over their sum, row by row, in float32 (float64 of float64).

    With `names` the columns are those of `width` that are named, and the others are zero.
    """
    *rows, count = logits.shape
    width = count if width is None else width
    flat = logits if len(rows) == 1 else logits.reshape(-1, count)
    apart, between = flat.stride()
    call = over_columns("law", flat, count, between)
    if call is None or logits.requires_grad:
        scores = logits if logits.dtype is torch.float64 else logits.float()
        law = (scores if temperature == 1.0 else scores / temperature).softmax(-1)
        return law if names is None else law.new_zeros(*rows, width).index_copy_(-1, names, law)
    law = torch.empty(*rows, width, dtype=torch.float32, device="cpu")
    call(
        flat.data_ptr(), len(flat), count, apart, max(1.0 / temperature, LEAST),
        None if names is None else names.data_ptr(), width, law.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return law


def owed(p: Float[Tensor, "V"], q: Float[Tensor, "V"], weight: float = 1.0) -> float | None:
    """The sum of relu(weight p - q); None where this cannot be had in C."""
    call = _over_both(p, q)
    if call is None:
        return None
    mass = c_double()
    call(p.data_ptr(), q.data_ptr(), len(p), weight, None, addressof(mass))
    return mass.value


def left_over(
    p: Float[Tensor, "V"], q: Float[Tensor, "V"], weight: float, mass: float
) -> Float[Tensor, "V"] | None:
    """relu(weight p - q) over its sum `mass`, above zero; None where this cannot be had in C."""
    call = _over_both(p, q)
    if call is None:
        return None
    law, whole = torch.empty_like(p), c_double(mass)
    call(p.data_ptr(), q.data_ptr(), len(p), weight, law.data_ptr(), addressof(whole))
    return law


def _over_both(p: Tensor, q: Tensor) -> Call | None:
    """What is owed of two laws of one type, each side by side in memory."""
    alike = p.dtype is q.dtype and q.is_cpu and q.stride(0) == 1 and len(p) == len(q)
    if not alike or p.requires_grad or q.requires_grad:
        return None
    return over_columns("owed", p, len(p), p.stride(0))


def without(
    law: Float[Tensor, "V"], tokens: Sequence[int]
) -> tuple[Float[Tensor, "V"], float] | None:
    """A law given that it is none of `tokens`, and its mass before, without which it is no law;
    None where this cannot be had in C."""
    call = over_columns("without", law, len(law), law.stride(0))
    beyond = any(not 0 <= token < len(law) for token in tokens)
    if call is None or beyond or law.requires_grad:
        return None
    left, mass, taken = torch.empty_like(law), c_double(), array("q", tokens)
    call(law.data_ptr(), len(law), *taken.buffer_info(), left.data_ptr(), addressof(mass))
    return left, mass.value


def drawn(law: Float[Tensor, "V"], coin: float) -> int | None:
    """The column where the running sum of a law first exceeds the share `coin` of its whole.

    Minus one where that is no law; None where this cannot be had in C.
    """
    width = law.shape[0]
    call = over_columns("drawn", law, width, law.stride(0))
    if call is None:
        return None
    column = c_int64()
    call(law.data_ptr(), width, coin, addressof(column))
    return column.value
