"""Laws of logits, and draws from them: in C, one pass where torch's operations make several."""

from __future__ import annotations

from ctypes import addressof, c_int64

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.native.library import over_columns

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
        None if names is None else names.data_ptr(), width, law.data_ptr(),
    )  # fmt: skip
    return law


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
