"""Distillation: a student learns the teacher's whole next-token law beside the data (Hinton et
al., 2015).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .language_model import weighted_cross_entropy


def forward_divergence(teacher: Tensor, student: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of KL(teacher || student) from logits; all flat: [n, V], [n, V], [n]."""
    log_p, log_q = F.log_softmax(teacher.float(), -1), F.log_softmax(student.float(), -1)
    losses = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    return (losses * weights).sum() / weights.sum().clamp_min(1e-8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distill:
    """(1 - share) * next-token loss + share * KL(teacher || student), on the data's own tokens."""

    teacher: nn.Module
    share: float = 0.9  # of the divergence in the loss

    def __call__(
        self, model: nn.Module, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, weights = batch["input_ids"], batch["weights"]
        with torch.no_grad():
            teacher = self.teacher(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        student = model(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        weights = weights[:, 1:].flatten()
        loss = weighted_cross_entropy(student, tokens[:, 1:].flatten(), weights)
        divergence = forward_divergence(teacher, student, weights)
        mixed = (1 - self.share) * loss + self.share * divergence
        return mixed, {"loss": loss.detach(), "divergence": divergence.detach()}
