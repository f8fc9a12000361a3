"""Predictors that say whether a layer already says what the last one will (arXiv 2504.08850)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.engine.session import Session
from foretoken.errors import check_values
from foretoken.heads.exits import ExitPredictors
from foretoken.training.config import TrainingConfig
from foretoken.training.features import Features
from foretoken.training.heads import Figures, HeadObjective


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitTraining(TrainingConfig):
    """SpecEE's predictors, trained on greedy text."""

    prompts: int = 200  # prompts to train on; a tenth as many more are held out
    temperature: float = 0.0  # of the models while they write; the head fits this one; 0: greedy
    steps: int | None = 600  # optimizer steps; none: as many as the epochs have
    candidates: int = 4  # likely tokens looked at; paper 4
    hidden: int = 512  # units of a predictor; paper 512

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        for name in ("candidates", "hidden"):
            check_values(self, (name, getattr(self, name) >= 1, "1 or more"))


class ExitObjective(HeadObjective):
    """Binary cross-entropy of all layers, each against its own labels."""

    config: ExitTraining

    def shape(self, session: Session) -> dict[str, Any]:
        layers = tuple(range(session.target.layers - 1))
        config = self.config
        return {"layers": layers, "candidates": config.candidates, "hidden": config.hidden}

    def __call__(
        self, model: nn.Module, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits = everywhere(model, batch)
        loss = F.binary_cross_entropy_with_logits(logits.float(), batch["labels"])
        return loss, {"loss": loss.detach()}

    def finish(
        self, head: ExitPredictors, train: Features, held_out: Features
    ) -> tuple[ExitPredictors, Figures]:
        """The head with the layers to ask always, and how often every layer is right.

        `larger_class` is the share of the larger class, which is what knowing nothing gets.
        """
        often = frequent(head, train)
        head.config = replace(head.config, often=often)
        labels = held_out.column("labels") > 0.5
        fires = held_out.each(lambda tokens: everywhere(head, tokens) > 0)
        right, yes = ((x.double().mean(0).tolist()) for x in (fires == labels, labels))
        figures = {
            f"layer {layer}": {
                "right": right[i],
                "larger_class": max(yes[i], 1.0 - yes[i]),
                "always_asked": float(layer in often),
            }
            for i, layer in enumerate(head.layers)
        }
        return head, figures


def everywhere(head: nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    """Every layer's logits [n, L - 1] of leaving behind it."""
    features: Tensor = tokens["features"]
    layers: tuple[int, ...] = head.layers  # type: ignore[assignment]
    return torch.stack([head(layer, features[:, i]) for i, layer in enumerate(layers)], 1)


def frequent(head: ExitPredictors, train: Features) -> tuple[int, ...]:
    """The half of the layers at which most texts would leave, were every layer asked."""

    def first(tokens: dict[str, Tensor]) -> Tensor:
        fires = (everywhere(head, tokens) > 0) & (tokens["labels"] > 0.5)
        return fires.float().argmax(1)[fires.any(1)]

    counts = torch.bincount(train.each(first), minlength=len(head.layers))
    best = counts.argsort(descending=True, stable=True)[: max(1, len(head.layers) // 2)]
    return tuple(sorted(head.layers[i] for i in best.tolist()))
