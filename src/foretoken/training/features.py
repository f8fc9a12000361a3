"""Small heads trained on captured features: the same stream and the same plan for all of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from foretoken.training import checkpoint
from foretoken.training.capture import Features
from foretoken.training.trainer import Objective, Progress, Trainer, TrainingPlan


@dataclass(frozen=True, slots=True)
class Fit:
    """How long and how fast."""

    epochs: int
    steps: int | None  # instead of epochs
    batch: int  # tokens
    rate: float
    seed: int


class Shuffled:
    """A stream of feature batches: every token once per epoch, in an order of the epoch's own."""

    def __init__(self, features: Features, batch: int, seed: int) -> None:
        self.features, self.seed = features, seed
        self.n = len(features["accept"])
        self.size = min(batch, self.n)
        self.per_epoch = max(1, self.n // self.size)

    def batch(self, index: int) -> dict[str, Tensor]:
        epoch, place = divmod(index, self.per_epoch)
        chance = random.Random(f"{self.seed}/{epoch}").getrandbits(62)
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(chance))
        chosen = order[place * self.size : (place + 1) * self.size]
        return {name: values[chosen] for name, values in self.features.items()}


def fit(
    head: nn.Module,
    objective: Objective,
    parts: tuple[Features, Features],
    how: Fit,
    folder: Path,
    *,
    name: str,
    show: bool = True,
) -> Progress:
    """Train on the first part, keep what is best on the second; goes on where `folder` stands."""
    train, dev = parts
    stream = Shuffled(train, how.batch, how.seed)
    steps = how.steps or how.epochs * stream.per_epoch
    every = max(1, steps // 20)
    held_out = Shuffled(dev, len(dev["accept"]), 0)
    plan = TrainingPlan(
        steps=steps,
        matrix_rate=0.0,
        vector_rate=how.rate,
        warmup=max(1, round(0.03 * steps)),
        save_every=every,
        evaluate_every=every,
        held_out_batches=1,
        patience=6,
        seed=how.seed,
    )
    trainer = Trainer(head, objective, stream, plan, folder, held_out=held_out, name=name)
    progress = trainer.run(show=show)
    if (folder / checkpoint.BEST).is_file():
        head.load_state_dict(checkpoint.load(folder / checkpoint.BEST)["model"])
    head.eval().requires_grad_(False)
    return progress
