"""Every exit of a draft learns the target's sparse laws (sorted fine-tuning, arXiv 2407.01955).

The paper takes the cross-entropy of the written token. Here the data hold the target's likeliest
tokens at every place, so each exit learns the law itself, of whichever target wrote the text: there
is more to learn from a place, and what is learned is what acceptance is made of.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.training.objectives.sparse_laws import SparseCrossEntropy, SparseLaws, saying


@dataclass(frozen=True, kw_only=True, slots=True)
class SortedLaws(SparseLaws):
    """The mean loss of the first layers up to each exit, under one norm and one output layer."""

    exits: tuple[int, ...]  # layers before each of them, ascending, the last one all

    @classmethod
    def at(cls, exits: Sequence[int], tokens: Tensor, vocab_size: int, hard: float) -> SortedLaws:
        plain = SparseLaws.over(tokens, vocab_size, hard)
        return cls(tokens=tokens, rows=plain.rows, hard=hard, exits=tuple(exits))

    def __call__(
        self, model: Any, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        told = self.of_each(model, batch)
        losses = torch.stack([loss for loss, _ in told])
        agreed, overlap = torch.stack([figures for _, figures in told]).mean(0)
        loss = losses.mean()
        return loss, {"loss": loss.detach(), "agreement": agreed, "overlap": overlap}

    def of_each(self, model: Any, batch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Loss and figures of each exit. What goes on to the next layers is not normed."""
        chosen, probs = self.laws(batch)
        table = model.get_output_embeddings().weight[self.tokens]
        where, learn = saying(batch), SparseCrossEntropy.apply
        return [
            learn(model.model.norm(states[where]), table, chosen, probs)  # type: ignore[no-untyped-call]
            for states in self.left(model.model, batch["input_ids"])
        ]

    def left(self, inner: Any, ids: Tensor) -> list[Tensor]:
        """What the layer before each exit gives [rows, T, H], of a decoder without its head."""
        hidden: Tensor = inner.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rotary = inner.rotary_emb(hidden, positions)
        found = []
        for count, layer in enumerate(inner.layers, 1):
            hidden = layer(
                hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary
            )
            if count in self.exits:
                found.append(hidden)
        return found
