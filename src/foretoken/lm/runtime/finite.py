"""Weights that are no numbers, found where a model is opened instead of in what it writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from foretoken.errors import CapabilityError, CheckpointError
from foretoken.lm.runtime.fingerprints import has_numbers, spread

GLANCED = 4096  # elements of each weight looked at when a model is opened


def check_finite(model: nn.Module, name: str, count: int | None = GLANCED) -> None:
    """CheckpointError where a weight holds NaN or infinity, at `count` places or anywhere."""
    bad = [key for key, weight in model.named_parameters() if not is_finite(weight, count)]
    if bad:
        others = f" and {len(bad) - 1} others" if len(bad) > 1 else ""
        raise CheckpointError(
            f"the weights of the {name} hold NaN or infinity: {bad[0]}{others}.",
            "text is written by finite weights; logits made from these are NaN.",
            "save or download the model again; after training, look for a loss that became NaN.",
        )


def is_finite(weight: Tensor, count: int | None) -> bool:
    if not has_numbers(weight) or not weight.is_floating_point():
        return True
    if weight.untyped_storage().nbytes() < weight.numel() * weight.element_size():
        return True  # stands where kernels='lean' freed a weight, or is one number repeated
    numbers = weight.detach() if count is None else spread(weight, count)
    return bool(torch.isfinite(numbers.float()).all())


def check_logits(model: Any, name: str, logits: Iterable[Tensor]) -> None:
    """Refuse a model whose own forward gives NaN, and say whether its weights are why."""
    if any(bool(part.isnan().any()) for part in logits):
        check_finite(model, name, None)
        refuse_overflow(model, name)


def refuse_overflow(model: Any, name: str) -> NoReturn:
    raise CapabilityError(
        f"the {name} ({type(model).__name__}, {model.dtype}) gives NaN logits.",
        f"its weights are finite, so its sums leave the range of {model.dtype}.",
        "load it with another dtype, such as float32 or bfloat16.",
    )
