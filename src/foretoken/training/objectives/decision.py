"""Decision models that choose depths for multi-candidate trees (arXiv 2409.10644).

A guess is judged below the target's own text, as it is drafted below the target's own candidates.
Two departures from the paper: labels come from whole texts instead of from rounds of one drafted
token, which collects one per token at the same law; and the hard model's classes are balanced by
weight instead of by leaving out guesses.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.engine.session import Session
from foretoken.heads.decision import DecisionHead
from foretoken.training.config import TrainingConfig
from foretoken.training.features import Features
from foretoken.training.heads import HeadObjective
from foretoken.training.objectives.acceptance import quality

SEEN = {"soft": "before", "hard": "certainty"}  # what each reads of a capture
LABELS = {"soft": "accept", "hard": "best"}  # and what it learns


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionTraining(TrainingConfig):
    """The paper's settings. Models of both kinds in one folder share what was captured."""

    model: Literal["soft", "hard"] = "soft"  # reads hidden states, or entropy and top probabilities
    epochs: int = 10  # passes over the captured tokens; paper 10
    batch: int = 50  # tokens in a step; paper 50


class DecisionObjective(HeadObjective):
    """Binary cross-entropy against the true chance (soft), or against 0 and 1 (hard).

    What is good counts (bad / good) times for the hard model, which balances its classes.
    """

    config: DecisionTraining

    def __init__(self, config: DecisionTraining, train: Features) -> None:
        super().__init__(config, train)
        self.seen, self.labels, self.weight = SEEN[config.model], LABELS[config.model], 1.0
        if config.model == "hard":
            good = float(train.column(self.labels).mean())
            self.weight = (1.0 - good) / good if 0.0 < good < 1.0 else 1.0

    def shape(self, session: Session) -> dict[str, Any]:
        return {"model": self.config.model}

    def __call__(
        self, model: nn.Module, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        margins, labels = model(batch[self.seen]), batch[self.labels]
        weight = labels.new_tensor(self.weight)
        loss = F.binary_cross_entropy_with_logits(margins, labels, pos_weight=weight)
        return loss, {"loss": loss.detach()}

    def judge(self, head: DecisionHead, held_out: Features) -> dict[str, float]:
        """How far outputs are from the labels, and how often their half is the labels' half.

        The hard model's outputs are chances under balanced classes, so only the last one judges it.
        """
        labels = held_out.column(self.labels)
        predicted = held_out.each(lambda tokens: head.likely(tokens[self.seen]))
        right = (predicted > 0.5) == (labels > 0.5)
        return quality(predicted, labels) | {"right": float(right.double().mean())}
