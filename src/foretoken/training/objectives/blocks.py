"""Heads that guess a block in one pass, trained from random places of texts (DFlash, DSpark)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.engine.session import Session
from foretoken.errors import check_values
from foretoken.lm.views.view import innermost
from foretoken.training.captures.texts import check_taps, fused_layers
from foretoken.training.objectives.guessing import DeepTraining, GuessObjective, layer_shape

ANCHORS = 8  # blocks learnt of a text in a step; paper 512


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTraining(DeepTraining):
    """DFlash's settings (arXiv 2602.06036), in the size of a small target."""

    depth: int = 7  # tokens of a block behind the last one; paper 15
    layers: int = 1  # decoder layers of the head; paper 5
    taps: tuple[int, ...] | None = None  # layers it reads; none: a low, a middle and a high one

    def __post_init__(self) -> None:
        DeepTraining.__post_init__(self)
        check_values(
            self,
            ("layers", self.layers >= 1, "1 or more"),
            ("taps", self.taps is None or min(self.taps, default=-1) >= 0, "layers, from 0 on"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectedTraining(BlockTraining):
    """DSpark's (arXiv 2607.05147)."""

    rank: int = 64  # of the table that corrects laws by the token before; paper 256

    def __post_init__(self) -> None:
        BlockTraining.__post_init__(self)
        check_values(self, ("rank", self.rank >= 1, "1 or more"))


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameTraining(BlockTraining):
    """CTC-drafter's (arXiv 2412.00061)."""

    depth: int = 8  # frames, which learn half as many tokens; paper 4 to 6


class BlockObjective(GuessObjective):
    """Of heads whose slots are read by the target's output layer."""

    @classmethod
    def completed(cls, config: Any, session: Session) -> Any:
        """As they are; ConfigError for layers that the target has not."""
        check_taps(config.taps, innermost(session.target))
        return config

    def shape(self, session: Session) -> dict[str, Any]:
        config = self.config
        return {
            "taps": config.taps or fused_layers(innermost(session.target).layers),
            "depth": config.depth,
            "layers": config.layers,
            "rank": getattr(config, "rank", 0),
            **layer_shape(session),
        }

    def learnt(
        self, head: Any, texts: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        at = anchors(texts["weights"], rng).to(texts["weights"].device)
        found: tuple[Tensor, dict[str, Tensor]] = head.learn(texts, self.ends, at)
        return found


def anchors(weights: Float[Tensor, "n T"], rng: random.Random) -> Int[Tensor, "n A"]:
    """Places of texts at which blocks begin: of those whose next token is learnt, if any is."""
    found = []
    for row in (weights[:, 1:] > 0).cpu():
        known = row.nonzero()[:, 0].tolist() or [0]
        found.append([rng.choice(known) for _ in range(ANCHORS)])
    return torch.tensor(found)
