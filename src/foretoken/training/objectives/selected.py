"""AdaSPEC: a draft learns the places that a twin of it could learn, and leaves out the others.

A reference, distilled from the same weights, shows by how much each place can be improved; only the
share of places with the largest gap between draft and reference counts (arXiv 2510.19779).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.training.objectives.distilled import Distilled, divergence
from foretoken.training.objectives.divergence import PIECE


@dataclass(frozen=True, slots=True)
class Selected:
    """Mean of the divergence over the `keep` share of places with the most to gain.

    The gap is detached, and taken anew in every step: what has been learned leaves the selection.
    Where gaps tie with the last one kept, all of them stay.
    """

    whole: Distilled
    reference: Any
    keep: float

    def __call__(
        self, model: Any, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        whole = self.whole
        places = whole.places(model, batch, rng)
        states = places.states(model)
        with torch.no_grad():
            gap = self.lost(model, states.detach(), places.laws) - self.lost(
                self.reference, places.states(self.reference), places.laws
            )
        chosen = largest(gap, self.keep)
        weights = chosen.float() / chosen.sum()
        loss, told = divergence(model, states, whole.tokens, places.laws, weights, whole.of)
        return loss, {**told, "gap": gap.mean()}

    def lost(self, model: Any, states: Tensor, laws: Tensor) -> Tensor:
        """The divergence of a model at each place [n]."""
        table = model.get_output_embeddings().weight[self.whole.tokens]
        kind = torch.bfloat16 if torch.is_autocast_enabled(states.device.type) else states.dtype
        starts = range(0, len(states), PIECE)
        return torch.cat([
            self.whole.of(
                laws[at : at + PIECE].float(),
                (states[at : at + PIECE].to(kind) @ table.to(kind).T).float().log_softmax(-1),
            )
            for at in starts
        ])  # fmt: skip


def largest(values: Tensor, share: float) -> Tensor:
    """Which of n values are among the largest `share` of them, ties with the last included."""
    kept = max(1, math.ceil(share * len(values)))
    return values >= values.topk(kept)[0][-1]
