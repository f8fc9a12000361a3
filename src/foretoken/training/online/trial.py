"""Whether more guesses of learned weights would be accepted than of those that serve.

Both are held against lessons before these are learned: what was learned, over and over, from a few
texts may say these better and all others worse.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from foretoken.training.objectives.sparse_laws import SparseLaws, answering_states
from foretoken.training.online.evidence import Lesson, collated


class Trial:
    """Gains of learned weights over serving ones on the last `lessons` lessons, in guesses."""

    def __init__(self, objective: SparseLaws, lessons: int) -> None:
        self.objective = objective
        self.gains: deque[float] = deque(maxlen=lessons)

    def hear(self, learned: Any, serving: Any, lesson: Lesson) -> None:
        """Try both models on a lesson that `learned` has not learned yet."""
        mine, theirs = (accepted(model, self.objective, lesson) for model in (learned, serving))
        self.gains.append(float(((mine - theirs) * lesson.counts.to(mine)).sum()))

    @property
    def passed(self) -> bool:
        """Whether the gains of a full window are above their standard error."""
        full = len(self.gains) == self.gains.maxlen
        return full and sum(self.gains) > math.sqrt(sum(gain * gain for gain in self.gains))

    def restart(self, gains: Iterable[float] = ()) -> None:
        """Forget what was heard of weights that serve now, but for `gains`."""
        self.gains.clear()
        self.gains.extend(gains)


@torch.no_grad()
def accepted(model: Any, objective: SparseLaws, lesson: Lesson) -> Tensor:
    """The chance [n] that the model's next guess is accepted at each place of a lesson.

    Where the target wrote its likeliest tokens: whether the model's likeliest is the one that was
    written. Else the overlap of both laws at temperature 1, whatever the row's own was.
    """
    device = next(model.parameters()).device
    batch = {name: part.to(device) for name, part in collated([lesson]).items()}
    table = model.get_output_embeddings().weight[objective.tokens]
    logits = (answering_states(model, batch) @ table.T).float()
    chosen, probs = objective.laws(batch)
    if lesson.greedy:
        right: Tensor = logits.argmax(-1) == chosen[:, -1]  # the last one is what was written
        return right.float()
    said = logits.log_softmax(-1).gather(-1, chosen.clamp(min=0)).exp()
    return torch.minimum(probs, said).sum(-1)
