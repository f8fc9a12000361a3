"""A toy run for the trainer's tests; run as a script it dies by SIGKILL at the batch it is told."""

import os
import random
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from foretoken.training.stream import Document, PackedStream
from foretoken.training.trainer import Trainer, TrainingPlan


class ToyModel(nn.Module):
    """An embedding, a hidden matrix with dropout, a head: every kind of weight, and torch's RNG."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.lm_head(
            self.norm(x + nn.functional.dropout(self.hidden(x), 0.1, self.training))
        )


def objective(model, batch, rng):
    tokens = batch["input_ids"]
    logits = model(tokens)[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    return loss * rng.choice([0.9, 1.1]), {"loss": loss.detach()}


def documents(rng: random.Random):
    while True:
        start, step = rng.randrange(11), rng.randrange(1, 3)
        tokens = [(start + i * step) % 11 for i in range(rng.randrange(4, 12))]
        yield Document(tokens, [1.0] * len(tokens))


class Deadly:
    """A stream that kills its own process when batch `at` is asked for."""

    def __init__(self, stream, at):
        self.stream, self.at = stream, at

    def batch(self, index):
        if index == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.stream.batch(index)


def trainer(folder, stream=None, loss=objective, **changes):
    torch.manual_seed(0)
    plain = PackedStream(documents=documents, tokens=64, row_tokens=(16,), pad=0)
    plan = TrainingPlan(
        **{"steps": 24, "warmup": 4, "save_every": 5, "evaluate_every": 6, "accumulate": 2}
        | changes
    )
    held_out = PackedStream(documents=documents, tokens=64, row_tokens=(16,), pad=0, seed=1)
    model = ToyModel()
    return Trainer(model, loss, stream or plain, plan, Path(folder), held_out=held_out), model


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, deadly_batch = sys.argv[1], int(sys.argv[2])
    plain = PackedStream(documents=documents, tokens=64, row_tokens=(16,), pad=0)
    trainer(folder, Deadly(plain, deadly_batch))[0].run(show=False)
