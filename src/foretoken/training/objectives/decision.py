"""Loss of the decision models that choose depths for multi-candidate trees."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

SEEN = {"soft": "before", "hard": "certainty"}  # what each reads of a capture
LABELS = {"soft": "accept", "hard": "best"}  # and what it learns


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Binary cross-entropy against the true chance (soft), or against 0 and 1 (hard)."""

    model: str = "soft"
    weight: float = 1.0  # of what is good; (bad / good) balances the classes

    def __call__(
        self, model: nn.Module, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        margins, labels = model(batch[SEEN[self.model]]), batch[LABELS[self.model]]
        weight = labels.new_tensor(self.weight)
        loss = F.binary_cross_entropy_with_logits(margins, labels, pos_weight=weight)
        return loss, {"loss": loss.detach()}
