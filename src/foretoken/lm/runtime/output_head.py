"""The output head of a model, with what the model's own forward does to its logits."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foretoken.errors import CapabilityError
from foretoken.lm.runtime.rounding import relative, unmasked
from foretoken.lm.runtime.taps import tapping
from foretoken.types import FinalNorm


class OutputHead:
    """Logits of states behind the last norm: the head, a scale, a soft cap.

    Configurations name the last two in several ways, so one small forward checks the result.
    """

    def __init__(self, model: Any, decoder: nn.Module) -> None:
        config = model.config.get_text_config(decoder=True)
        self.head: nn.Module = model.get_output_embeddings()
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)
        self.scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)
        ids = torch.arange(3, device=model.device)[None]
        with torch.inference_mode(), tapping((), decoder, (FinalNorm(),)) as states:
            said = model(input_ids=ids, use_cache=False).logits[0].float()
        made, said = unmasked(self(states[0][0]), said)
        if relative((made - said).abs().max(), said.std().clamp_min(1e-12)) > 0.01:
            raise CapabilityError(
                f"logits of hidden states of {type(model).__name__} were asked for.",
                "it does more to its head's output than scale it and cap it.",
                "use a method without feature heads: chain, prompt-lookup, plain.",
            )

    def __call__(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        return self.shaped(self.head(hidden))

    def shaped(self, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Logits of the head alone, scaled and capped."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
