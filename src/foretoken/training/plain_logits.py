"""Whether a draft's laws are what is learned of it: its last states times its output layer."""

from __future__ import annotations

from typing import Any

import torch

from foretoken.errors import CapabilityError


@torch.no_grad()
def check_linear(model: Any, doing: str) -> None:
    """CapabilityError for a draft whose logits are more than its output layer's product."""
    ids = torch.arange(3, device=next(model.parameters()).device)[None]
    logits = model(input_ids=ids, use_cache=False).logits
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    plain = states @ model.get_output_embeddings().weight.T
    near = logits.shape == plain.shape and torch.allclose(logits, plain, atol=1e-2, rtol=1e-2)
    if not near:
        raise CapabilityError(
            f"{doing} was asked of a draft, {type(model).__name__}.",
            "its logits are not the product of its last states and its output layer: they are "
            "scaled, capped or shifted, and its loss would be another model's.",
            "use a draft that is a plain Llama, Qwen or SmolLM, as `foretoken train draft` makes.",
        )
