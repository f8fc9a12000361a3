"""Trains an acceptance head for two table models; run as a script it dies by SIGKILL on the way."""

import os
import signal
import sys
from pathlib import Path

import torch

from foretoken.engine.assemble import assemble
from foretoken.engine.session import Session
from foretoken.lm.table import TableLM
from foretoken.training import capture, features
from foretoken.training.heads import run_training
from foretoken.training.objectives.acceptance import AcceptanceTraining

VOCAB = 6


def session():
    """A draft that likes some tokens more than its target does, wherever they stand."""
    target, draft = TableLM.random(VOCAB, seed=1), TableLM.random(VOCAB, seed=2)
    liking = torch.linspace(-1.5, 1.5, VOCAB, dtype=torch.float64)
    draft.logits.copy_(target.logits + 0.3 * draft.logits + liking)
    return Session(assemble("chain", target, draft, depth=3), method="chain", draft=draft)


def some(count, start=0):
    return [[(start + i) % VOCAB, (2 * i) % VOCAB, 1] for i in range(count)]


def prompts(split, count):
    """40 to train on and 12 to judge by, whatever a tenth would be."""
    return some(count) if split == "train" else some(12, start=3)


def settings(**changes):
    small = {"prompts": 40, "new_tokens": 12, "seed": 3, "blocks": 2, "steps": 40, "batch": 64}
    return AcceptanceTraining(**{**small, "weight": 1.0, "rate": 5e-3, **changes})


def train(out, **changes):
    config = settings(**changes)
    return run_training(session(), "acceptance", prompts, config, Path(out), show=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, where = sys.argv[1:]

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "collecting":
        whole, done = capture.shard, []

        def shard(*given):
            done.append(1)
            return die() if len(done) == 3 else whole(*given)

        capture.shard = shard
    else:
        batch = features.Shuffled.batch
        features.Shuffled.batch = lambda stream, index: (
            die() if index == 27 else batch(stream, index)
        )
    train(out)
