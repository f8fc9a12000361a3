"""Whether learned weights would be accepted more often than those that serve, before they serve.

Both are held against lessons that neither has learned: what was learned, over and over, from a few
texts may say these better and all others worse.
"""

from __future__ import annotations

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
        self.gains.append(float(((mine - theirs) * lesson.stands.to(mine)).sum()))

    @property
    def passed(self) -> bool:
        return len(self.gains) == self.gains.maxlen and sum(self.gains) > 0

    def begin(self, gains: Iterable[float] = ()) -> None:
        """Forget what was heard of weights that serve now, but for `gains`."""
        self.gains.clear()
        self.gains.extend(gains)


@torch.no_grad()
def accepted(model: Any, objective: SparseLaws, lesson: Lesson) -> Tensor:
    """The chance [n] that the model's next guess is accepted at each place of a lesson.

    Greedy: whether its likeliest token is the one that was written. Else the overlap of its law
    with the target's, both at temperature 1.
    """
    device = next(model.parameters()).device
    batch = {name: part.to(device) for name, part in collated([lesson]).items()}
    table = model.get_output_embeddings().weight[objective.tokens]
    logits = (answering_states(model, batch) @ table.T).float()
    chosen, probs = objective.laws(batch)
    if lesson.greedy:
        stands: Tensor = logits.argmax(-1) == chosen[:, -1]  # the last one is what was written
        return stands.float()
    said = logits.log_softmax(-1).gather(-1, chosen.clamp(min=0)).exp()
    return torch.minimum(probs, said).sum(-1)
