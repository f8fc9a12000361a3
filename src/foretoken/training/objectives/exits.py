"""Predictors that say whether a layer already says what the last one will (arXiv 2504.08850).

What a predictor reads depends on which layer was asked before its own, so every token is trained
under a schedule as decoding draws it: the layers that are always asked, and those near a few exits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from foretoken.engine.session import Session
from foretoken.errors import check_values
from foretoken.heads.exits import ExitPredictors
from foretoken.lm.views.early_exit_scoring import features
from foretoken.training.config import TrainingConfig
from foretoken.training.features import Features
from foretoken.training.heads import Figures, HeadObjective


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitTraining(TrainingConfig):
    """SpecEE's predictors, trained on greedy text."""

    prompts: int = 200  # prompts to train on; a tenth as many more are held out
    temperature: float = 0.0  # of the models while they write; the head fits this one; 0: greedy
    # optimizer steps; none, or where epochs are passed: as many as those have
    steps: int | None = 600
    candidates: int = 4  # likely tokens looked at; paper 4
    hidden: int = 512  # units of a predictor; paper 512
    recent: int = 5  # last exits of a text that decide which further layers are asked; paper 5
    around: int = 2  # layers on each side of a recent exit; paper 2

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        for name in ("candidates", "hidden", "recent"):
            check_values(self, (name, getattr(self, name) >= 1, "1 or more"))
        check_values(self, ("around", self.around >= 0, "0 or more"))


class ExitObjective(HeadObjective):
    """Binary cross-entropy of the layers that a schedule asks, each against its own labels."""

    config: ExitTraining

    def __init__(self, config: ExitTraining, train: Features) -> None:
        super().__init__(config, train)
        self.exits = settled(train.column("labels"))

    def shape(self, session: Session) -> dict[str, Any]:
        layers = tuple(range(session.target.layers - 1))
        names = ("candidates", "hidden", "recent", "around")
        options = {name: getattr(self.config, name) for name in names}
        return {"layers": layers, "often": frequent(self.exits, len(layers)), **options}

    def __call__(
        self, model: nn.Module, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        asked = self.schedules(model, len(batch["labels"]), rng.getrandbits(62))
        asked = asked.to(batch["labels"].device)
        logits = everywhere(model, batch["scores"], asked)
        losses = F.binary_cross_entropy_with_logits(
            logits.float(), batch["labels"], reduction="none"
        )
        loss = losses[asked].mean()
        return loss, {"loss": loss.detach()}

    def schedules(self, head: Any, count: int, seed: int) -> Bool[Tensor, "n L"]:
        """The layers asked at each of `count` tokens, after exits as texts have them."""
        generator = torch.Generator().manual_seed(seed)
        size = count, self.config.recent
        chosen = torch.randint(len(self.exits), size, generator=generator)
        return head.asked(self.exits[chosen])  # type: ignore[no-any-return]

    def finish(
        self, head: ExitPredictors, train: Features, held_out: Features
    ) -> tuple[ExitPredictors, Figures]:
        """How often every layer is right where it is asked.

        `larger_class` is the share of the larger class, which is what knowing nothing gets.
        """
        labels = held_out.column("labels") > 0.5
        asked = self.schedules(head, len(labels), 0)
        with torch.no_grad():
            fires = everywhere(head, held_out.column("scores"), asked) > 0
        figures = {}
        for i, layer in enumerate(head.layers):
            here = asked[:, i]
            right, yes = ((x[here, i].double().mean()) for x in (fires == labels, labels))
            figures[f"layer {layer}"] = {
                "right": float(right),
                "larger_class": max(float(yes), 1.0 - float(yes)),
                "asked": float(here.double().mean()),
                "always_asked": float(layer in head.often),
            }
        return head, figures


def everywhere(
    head: nn.Module, scores: Float[Tensor, "n L K"], asked: Bool[Tensor, "n L"]
) -> Float[Tensor, "n L"]:
    """Every layer's logits of leaving behind it, if the layers `asked` were asked below it."""
    law = torch.zeros_like(scores[:, 0])  # of the layer that was asked before
    found = []
    for i, layer in enumerate(head.layers):  # type: ignore[arg-type]
        seen, own = features(scores[:, i], law)
        found.append(head(layer, seen))
        law = torch.where(asked[:, i, None], own, law)
    return torch.stack(found, 1)


def settled(labels: Float[Tensor, "n L"]) -> Int[Tensor, "n"]:
    """The first layer from which on every one says what the last one does; L: none does."""
    agreeing: Tensor = (labels.flip(1) > 0.5).long().cumprod(1).sum(1)
    return labels.shape[1] - agreeing


def frequent(exits: Int[Tensor, "n"], layers: int) -> tuple[int, ...]:
    """The half of the layers behind which most tokens could leave, were every layer asked."""
    counts = torch.bincount(exits, minlength=layers)[:layers]
    best = counts.argsort(descending=True, stable=True)[: max(1, layers // 2)]
    return tuple(sorted(best.tolist()))
