"""Loss of a head that predicts acceptance, and how good its predictions are."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def weighted_loss(logits: Tensor, accept: Tensor, weight: float) -> Tensor:
    """Cross-entropy with soft labels [n], where rejection counts `weight` times (SpecDec++).

    `logits` [n, 2] are those of rejection and acceptance. At weight 1 it is the mean binary
    cross-entropy; above, its optimum is not a but a / (a + weight (1 - a)): drafts get shorter.
    """
    logs = F.log_softmax(logits.float(), -1)
    rejected = weight * (1.0 - accept)
    return -(rejected * logs[:, 0] + accept * logs[:, 1]).sum() / (rejected + accept).sum()


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """The weighted loss on `hidden`, against the true chances or against logged outcomes."""

    weight: float = 6.0  # of rejections; most tokens are accepted
    labels: str = "accept"  # "outcome": what a log shows, 0 or 1

    def __call__(
        self, model: nn.Module, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = weighted_loss(model(batch["hidden"]), batch[self.labels], self.weight)
        return loss, {"loss": loss.detach()}


def quality(predicted: Tensor, accept: Tensor, bins: int = 10) -> dict[str, float]:
    """How far predicted chances [n] are from the true ones [n].

    `brier` is the mean squared error, which a log of outcomes could only estimate; `base` is that
    of the constant prediction that knows nothing but the mean; `divergence` the mean KL from the
    true Bernoulli law; `ece` the mean gap over bins of equal counts.
    """
    predicted, accept = predicted.double().clamp(1e-7, 1 - 1e-7), accept.double()
    kl = torch.xlogy(accept, accept / predicted)
    kl = kl + torch.xlogy(1 - accept, (1 - accept) / (1 - predicted))
    order = predicted.argsort()
    gaps = [
        (part.numel() * (predicted[part].mean() - accept[part].mean()).abs())
        for part in order.chunk(bins)
    ]
    return {
        "brier": float((predicted - accept).square().mean()),
        "base": float((accept - accept.mean()).square().mean()),
        "divergence": float(kl.mean()),
        "ece": float(torch.stack(gaps).sum() / len(accept)),
    }
