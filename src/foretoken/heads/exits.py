"""Predictors of SpecEE (arXiv 2504.08850): may the target's forward end behind this layer?

One small MLP per layer reads, for K likely tokens, their logits, their law among themselves and how
that law changed since the layer asked before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foretoken.heads import store

KIND = "exits"


class ExitPredictors(nn.Module):
    """One MLP of `hidden` units per layer in `layers`."""

    def __init__(
        self,
        layers: Sequence[int],
        *,
        candidates: int = 4,
        hidden: int = 512,
        often: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.layers, self.candidates, self.hidden = tuple(layers), candidates, hidden
        self.often = tuple(layers if often is None else often)  # always asked: where exits happen
        made = {str(layer): predictor(3 * candidates, hidden) for layer in layers}
        self.predictors = nn.ModuleDict(made)

    def forward(self, layer: int, features: Float[Tensor, "*n F"]) -> Float[Tensor, "*n"]:
        """Logits of leaving behind `layer`."""
        logits: Tensor = self.predictors[str(layer)](features)[..., 0]
        return logits

    @torch.inference_mode()
    def sure(self, layer: int, features: Float[Tensor, "n F"]) -> list[float]:
        """The predicted chance that the last layer says what this one does."""
        first: Any = self.predictors[str(layer)]
        chances: list[float] = self(layer, features.to(first[0].weight)).sigmoid().tolist()
        return chances


def predictor(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def save(
    folder: str | Path,
    head: ExitPredictors,
    hidden_size: int,
    vocab_size: int,
    notes: Mapping[str, Any],
) -> Path:
    """Write predictors so that `load` finds them."""
    card = store.Card(
        kind=KIND,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        options={
            "layers": list(head.layers),
            "candidates": head.candidates,
            "hidden": head.hidden,
            "often": list(head.often),
        },
        notes=notes,
    )
    return store.save(folder, head, card)


def load(folder: str | Path) -> tuple[ExitPredictors, store.Card]:
    """The predictors of a folder, frozen, and their card."""
    card = store.read_card(folder, KIND)
    try:
        head = ExitPredictors(**card.options)
    except TypeError as error:
        raise store.broken(folder, KIND, f"unknown options ({error})") from error
    store.load_into(head, folder, KIND)
    return head, card
