"""Logits from a cache against those of a forward without one, while a text is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.errors import WrongLogits
from foretoken.lm.runtime.rounding import allowed, error_of, relative, unmasked


def compare_with_fresh(
    model: Any, tokens: list[int], cached: Tensor, verified: float, **options: Any
) -> None:
    """WrongLogits where `cached` [V] are not the logits that follow `tokens`."""
    ids = torch.tensor([tokens], device=model.device)
    fresh = model(input_ids=ids, use_cache=False, **options).logits[0, -1]
    found, right = unmasked(cached, fresh)
    error = relative(error_of(found, right), right.std())
    if not error <= allowed(model.dtype):
        raise WrongLogits(
            f"{model.config.model_type} was asked to write on after {len(tokens)} tokens.",
            f"logits from its cache are off by {error:.0%} of their spread there; up to "
            f"{verified} tokens they were right.",
            "use plain transformers generate for texts of this length.",
        )
