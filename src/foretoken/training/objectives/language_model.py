"""Next-token loss, plain and with LayerSkip's layer dropout and early-exit loss."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean over target tokens of -log p(target), each counted by its weight. All flat: [n, V],
    [n], [n].
    """
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp_min(1e-8)


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModel:
    """Predict every next token, for any causal language model."""

    def count(self, batch: dict[str, Tensor]) -> float:
        """The weight that the loss is a mean over."""
        return float(batch["weights"][:, 1:].sum())

    def __call__(
        self, model: Any, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, weights = batch["input_ids"], batch["weights"]
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = weighted_cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), weights[:, 1:].flatten()
        )
        return loss, {"loss": loss.detach()}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSkip:
    """Layer dropout growing with depth, and a loss at one early exit per step (Elhoushi et al.,
    2024).

    We differ in two ways, both for cost: one exit is drawn per step instead of a weighted sum over
    all of them, and its loss is taken on a part of the tokens. Layers are dropped for a whole
    batch, not per row.
    """

    dropout: float = (
        0.1  # of the last layer; layer l of L is dropped with dropout * (2^(l/(L-1)) - 1)
    )
    exit_weight: float = 0.2  # of the early-exit loss against the final one
    exit_part: int = 4  # one token of this many enters the early-exit loss
    exits: tuple[int, ...] = (
        2,
        3,
        4,
        6,
        8,
        10,
    )  # layers after which an exit may be drawn

    def __call__(
        self, model: Any, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, weights = batch["input_ids"], batch["weights"]
        exit_at = rng.choice(self.exits)
        final, early = self._hidden(model, tokens, exit_at, rng)
        targets, weights = tokens[:, 1:].flatten(), weights[:, 1:].flatten()
        logits = model.lm_head(model.model.norm(final[:, :-1])).flatten(0, 1)
        loss = weighted_cross_entropy(logits, targets, weights)
        part = slice(rng.randrange(self.exit_part), None, self.exit_part)
        early = early[:, :-1].flatten(0, 1)[part]
        exit_logits = model.lm_head(model.model.norm(early))
        exit_loss = weighted_cross_entropy(exit_logits, targets[part], weights[part])
        return loss + self.exit_weight * exit_loss, {
            "loss": loss.detach(),
            "exit_loss": exit_loss.detach(),
        }

    def _hidden(
        self, model: Any, tokens: Tensor, exit_at: int, rng: random.Random
    ) -> tuple[Tensor, Tensor]:
        """The hidden states after the last layer and after `exit_at` layers, with some layers
        left out.
        """
        inner = model.model
        hidden = inner.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rotary = inner.rotary_emb(hidden, positions)
        early, last = hidden, len(inner.layers) - 1
        for i, layer in enumerate(inner.layers):
            if rng.random() >= self.dropout * (2 ** (i / last) - 1):
                hidden = layer(
                    hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary
                )
            if i + 1 == exit_at:
                early = hidden
        return hidden, early
