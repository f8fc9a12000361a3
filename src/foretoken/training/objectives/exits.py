"""Loss of predictors that say whether a layer already says what the last one will."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitLoss:
    """Binary cross-entropy of all layers, each against its own labels."""

    layers: tuple[int, ...]

    def __call__(
        self, model: nn.Module, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits = torch.stack(
            [model(layer, batch["features"][:, i]) for i, layer in enumerate(self.layers)], 1
        )
        loss = F.binary_cross_entropy_with_logits(logits.float(), batch["labels"])
        return loss, {"loss": loss.detach()}


def accuracy(chances: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Per layer, of predictions [n, L] against labels [n, L]: share right, and share of the larger
    class, which is what knowing nothing gets."""
    right = ((chances > 0.5) == (labels > 0.5)).double().mean(0)
    often = labels.double().mean(0)
    return {"accuracy": right.tolist(), "majority": torch.maximum(often, 1 - often).tolist()}
