"""A draft learns laws that nobody kept: the target is asked along its texts while it learns."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.training.dataset.records import Laws
from foretoken.training.objectives.distilled import parts, target_logits
from foretoken.training.objectives.sparse_laws import SparseLaws


@dataclass(frozen=True, slots=True)
class AskedLaws:
    """The loss of `told` with the `size` likeliest tokens that `target` says at every answer.

    A row of a batch holds one chat.
    """

    told: SparseLaws
    target: LanguageModel
    size: int = 16

    def __call__(
        self, model: Any, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        found = Laws.likeliest(target_logits(self.target, *parts(batch)), self.size)
        device = batch["input_ids"].device
        laws = {"laws": found.tokens.to(device), "log_probs": found.log_probs.to(device)}
        return self.told(model, {**batch, **laws}, rng)

    def count(self, batch: dict[str, Tensor]) -> int:
        """The places that the loss is a mean over."""
        return self.told.count(batch)
