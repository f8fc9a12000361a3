"""An acceptance head: its loss, its calibration, and how good its predictions are."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.engine.session import Session
from foretoken.errors import check_values
from foretoken.heads.acceptance import AcceptanceHead
from foretoken.training.calibrate import Cape, cape, margins, scaled
from foretoken.training.config import TrainingConfig
from foretoken.training.features import Features
from foretoken.training.heads import Figures, HeadObjective

Calibration = Literal["temperature", "shift", "cape-bin", "cape-kde"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceTraining(TrainingConfig):
    """SpecDec++ (arXiv 2405.19715), its defaults where it says them."""

    mix: float = 0.15  # share of the target's own tokens in what the draft model reads
    blocks: int = 3  # residual blocks of the head; paper's best 3
    shared: bool = False  # one block, repeated: the released code's
    weight: float = 6.0  # of a rejection in the loss, as most tokens are accepted; paper 6
    labels: Literal["accept", "outcome"] = "accept"  # true chances, or what a log shows: 0 or 1
    calibration: Calibration | None = None  # of the head, on half of the held-out tokens

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        check_values(
            self,
            ("mix", 0.0 <= self.mix < 1.0, "0 or more and below 1"),
            ("blocks", self.blocks >= 0, "0 or more"),
            ("weight", self.weight > 0.0, "above 0"),
        )


class AcceptanceObjective(HeadObjective):
    """The weighted loss on `hidden`, against the true chances or against logged outcomes."""

    config: AcceptanceTraining

    def shape(self, session: Session) -> dict[str, Any]:
        return {"blocks": self.config.blocks, "shared": self.config.shared}

    def __call__(
        self, model: nn.Module, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        labels = batch[self.config.labels]
        loss = weighted_loss(model(batch["hidden"]), labels, self.config.weight)
        return loss, {"loss": loss.detach()}

    def judge(self, head: nn.Module, held_out: Features) -> dict[str, float]:
        return judged(margins(head, held_out).sigmoid(), held_out.column("accept").double())

    def finish(
        self, head: AcceptanceHead, train: Features, held_out: Features
    ) -> tuple[AcceptanceHead, Figures]:
        """The head under the calibration asked for, and every cheap way of calibration judged.

        Half of the held-out tokens fit it, the other half judge it.
        """
        asked, accept = self.config.calibration or "none", held_out.column("accept").double()
        half = len(accept) // 2
        margin, labels = margins(head, held_out), held_out.column(self.config.labels)
        ways: dict[str, tuple[Any, Tensor, float, float]] = {"none": (head, margin, 1.0, 0.0)}
        for way in ("temperature", "shift"):
            fitted = scaled(margin[:half], labels[:half], shift=way == "shift")
            ways[way] = (head, margin, *fitted)
        if asked.startswith("cape"):
            plan = Cape(kind=asked.removeprefix("cape-"), seed=self.config.seed)
            mended = cape(head, train, held_out, half, plan)
            ways[asked] = (mended, margins(mended, held_out), 1.0, 0.0)
        figures = {
            way: judged((margin[half:] / temperature + shift).sigmoid(), accept[half:])
            for way, (_, margin, temperature, shift) in ways.items()
        }
        chosen, _, temperature, shift = ways[asked]
        chosen.config = replace(chosen.config, temperature=temperature, shift=shift)
        return chosen, figures


def weighted_loss(logits: Tensor, accept: Tensor, weight: float) -> Tensor:
    """Cross-entropy with soft labels [n], where rejection counts `weight` times (SpecDec++).

    `logits` [n, 2] are those of rejection and acceptance. At weight 1 it is the mean binary
    cross-entropy; above, its optimum is not a but a / (a + weight (1 - a)): drafts get shorter.
    """
    logs = F.log_softmax(logits.float(), -1)
    rejected = weight * (1.0 - accept)
    return -(rejected * logs[:, 0] + accept * logs[:, 1]).sum() / (rejected + accept).sum()


def judged(predicted: Tensor, accept: Tensor) -> dict[str, float]:
    """Figures of predictions, with their mean on what is mostly taken or rejected."""
    likely = accept >= 0.5
    return quality(predicted, accept) | {
        "mean_if_accepted": float(predicted[likely].mean()),
        "mean_if_rejected": float(predicted[~likely].mean()),
    }


def quality(predicted: Tensor, accept: Tensor, bins: int = 10) -> dict[str, float]:
    """How far predicted chances [n] are from the true ones [n].

    `brier` is the mean squared error, which a log of outcomes could only estimate; `base` is that
    of the constant prediction that knows nothing but the mean; `divergence` the mean KL from the
    true Bernoulli law; `ece` the mean gap over bins of equal counts; `mean` the mean true chance.
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
        "mean": float(accept.mean()),
    }
