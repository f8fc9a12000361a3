"""Predictors of SpecEE (arXiv 2504.08850): may the target's forward end behind this layer?

One small MLP per layer reads, for K likely tokens, their logits, their law among themselves and how
that law changed since the layer asked before. Which layer that was follows from the schedule, so
predictors and schedule belong together: the head knows the one it was trained under.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from foretoken.heads.table import HeadConfig


class ExitPredictors(nn.Module):
    """One MLP of `hidden` units per layer in `layers`."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        layers: tuple[int, ...]
        candidates: int = 4  # likely tokens that are looked at
        hidden: int = 512
        often: tuple[int, ...] | None = None  # always asked: where exits happen; None: every layer
        recent: int = 5  # last exits of a text that decide which further layers are asked
        around: int = 2  # layers on each side of a recent exit

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.layers, self.candidates = config, config.layers, config.candidates
        width = 3 * config.candidates
        made = {str(layer): predictor(width, config.hidden) for layer in config.layers}
        self.predictors = nn.ModuleDict(made)

    @property
    def often(self) -> tuple[int, ...]:
        """The layers that are always asked."""
        return self.layers if self.config.often is None else self.config.often

    def asked(self, exits: Int[Tensor, "n recent"]) -> Bool[Tensor, "n L"]:
        """Which of `layers` are asked after these last exits (indexes of layers; section 5.2)."""
        layers = torch.tensor(self.layers, device=exits.device)
        near = ((exits[:, :, None] - layers).abs() <= self.config.around).any(1)
        often = torch.tensor(self.often, device=exits.device)
        return near | torch.isin(layers, often)

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
