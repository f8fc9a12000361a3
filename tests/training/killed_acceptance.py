"""Trains an acceptance head for two table models; run as a script it dies by SIGKILL on the way."""

import os
import signal
import sys
from pathlib import Path

import torch

from foretoken.engine.assemble import assemble
from foretoken.engine.session import Session
from foretoken.lm.table import TableLM
from foretoken.training import acceptance, capture, features
from foretoken.training.capture import Capture
from foretoken.training.objectives.acceptance import Acceptance

VOCAB = 6


def session():
    """A draft that likes some tokens more than its target does, wherever they stand."""
    target, draft = TableLM.random(VOCAB, seed=1), TableLM.random(VOCAB, seed=2)
    liking = torch.linspace(-1.5, 1.5, VOCAB, dtype=torch.float64)
    draft.logits.copy_(target.logits + 0.3 * draft.logits + liking)
    for table in (target, draft):
        table.close = lambda: None
    return Session(assemble("chain", target, draft, depth=3), method="chain", draft=draft)


def prompts(count, start=0):
    return [[(start + i) % VOCAB, (2 * i) % VOCAB, 1] for i in range(count)]


def lesson(**changes):
    settings = {
        "capture": Capture(new_tokens=12, seed=3),
        "objective": Acceptance(weight=1.0),
        "blocks": 2,
        "steps": 40,
        "batch": 64,
        "rate": 5e-3,
    }
    return acceptance.Lesson(**settings | changes)


def train(out, **changes):
    some = prompts(40), prompts(12, start=3)
    return acceptance.run(session(), some, lesson(**changes), Path(out), show=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, where = sys.argv[1:]

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "collecting":
        whole, done = capture._shard, []

        def shard(*given):
            done.append(1)
            return die() if len(done) == 3 else whole(*given)

        capture._shard = shard
    else:
        batch = features.Shuffled.batch
        features.Shuffled.batch = lambda stream, index: (
            die() if index == 27 else batch(stream, index)
        )
    train(out)
