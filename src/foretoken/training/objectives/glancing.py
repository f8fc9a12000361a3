"""Coupled sequential glancing: a head that guesses blocks is shown some of the answers (Falcon).

A first pass without gradients counts the wrong guesses of each text. In the second one, which is
learnt from, so many answers as a share of them stand in place of inputs at the beginning of some
blocks, and the rest of these blocks learns what follows from them. The share falls to nothing along
the training (arXiv 2412.12639).

Departures: runs of answers are drawn until that many are shown, whatever the size of a block; and
they are left out of the loss unless that is asked for, as a slot that reads its answer has nothing
to learn. Where blocks begin is drawn anew in each step, as in drafts they begin anywhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from foretoken.engine.session import Session
from foretoken.errors import check_values
from foretoken.training.objectives.guessing import FeatureObjective, FeatureTraining


@dataclass(frozen=True, kw_only=True, slots=True)
class GlancingTraining(FeatureTraining):
    """Falcon's settings (arXiv 2412.12639), at a rate for small models."""

    block: int = 2  # tokens guessed in a pass; paper 2
    glanced: float = 0.4  # answers shown at first, a share of the wrong guesses; paper 0.4
    mask_glanced: bool = True  # whether the loss leaves them out; the release keeps them

    def __post_init__(self) -> None:
        FeatureTraining.__post_init__(self)
        check_values(
            self,
            ("block", self.block >= 1, "1 or more"),
            ("glanced", 0.0 <= self.glanced <= 1.0, "0 (none) to 1"),
            ("window", self.window > self.block, f"more than a block of {self.block}"),
        )


class GlancingObjective(FeatureObjective):
    """The head's own loss, with some of its answers shown to it."""

    share = 0.0  # of the wrong guesses

    def shape(self, session: Session) -> dict[str, Any]:
        return {"block": self.config.block, **super().shape(session)}

    def reach(self, done: float) -> None:
        """Show less and less."""
        self.share = self.config.glanced * (1.0 - done)

    def learnt(
        self, head: Any, texts: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        at = head.slots(texts, -rng.randrange(head.block))
        learnt, shown = head.counted(texts, at), None
        if torch.is_grad_enabled():
            shown = glances(self.wrong(head, texts, at, learnt), learnt, self.share, rng)
            learnt = learnt & ~shown if self.config.mask_glanced else learnt
        found: tuple[Tensor, dict[str, Tensor]] = head.learn(texts, self.ends, at, learnt, shown)
        return found

    @torch.no_grad()
    def wrong(
        self, head: Any, texts: dict[str, Tensor], at: Tensor, learnt: Bool[Tensor, "n A k"]
    ) -> Bool[Tensor, "n A k"]:
        """Slots whose likeliest token is another than the target's, where nothing is shown."""
        states = head.guessed(texts, self.ends, at)[learnt]
        places = (at + head.block - 1).clamp(max=texts["input_ids"].shape[1] - 1)
        said, law = (self.ends.unembed(one) for one in (states, texts["hidden"][:, places][learnt]))
        found = torch.zeros_like(learnt)
        found[learnt] = said.argmax(-1) != law.argmax(-1)
        torch.clear_autocast_cache()  # of weights without gradients, which learning would get
        return found


def glances(
    wrong: Bool[Tensor, "n A k"], learnt: Bool[Tensor, "n A k"], share: float, rng: random.Random
) -> Bool[Tensor, "n A k"]:
    """Slots whose answers are shown: runs at the beginning of blocks, never the whole of one."""
    shown = torch.zeros(learnt.shape, dtype=torch.bool)
    size = learnt.shape[-1]
    if size > 1:
        for own, missed, whole in zip(shown, wrong.sum((1, 2)).tolist(), learnt.all(-1).cpu(),
                                      strict=True):  # fmt: skip
            left, blocks = round(share * missed), whole.nonzero()[:, 0].tolist()
            for block in rng.sample(blocks, len(blocks)):
                run = min(left, rng.randint(1, size - 1))
                own[block, :run] = True
                left -= run
    return shown.to(learnt.device)
