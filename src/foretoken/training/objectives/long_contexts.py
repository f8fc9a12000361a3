"""LongSpec's training: short texts at the positions of long ones (arXiv 2502.17421).

Anchor-offset indices: the first tokens of a text stay where they are and the others move on by a
number drawn for each step, so that large positions are learnt from short texts. Flash noisy
training: the target's last rows are withheld, as they are at some depth of a draft.

Departure: the target is not run at the moved positions. Its captured keys are rotated on, which is
what it would have computed but for its own view of the first tokens from afar.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.contract import LayerCache
from foretoken.engine.session import Session
from foretoken.errors import CapabilityError, check_values
from foretoken.lm.views.view import innermost
from foretoken.training.captures.keys_values import SINKS
from foretoken.training.features import Features
from foretoken.training.objectives.guessing import GuessObjective, GuessTraining, layer_shape

FARTHEST = 30_000  # of the paper's offsets


@dataclass(frozen=True, kw_only=True, slots=True)
class LongContextTraining(GuessTraining):
    """LongSpec's settings (arXiv 2502.17421), for texts of a small target."""

    window: int = 256  # tokens read of a text: its first four and its last ones; paper 1024
    sliding_window: int = 512  # tokens that the head's own attention sees; paper 512
    offset: int | None = None  # most that texts are moved; none: to the last position, 30000 or 0
    noise: int = 4  # most rows of the target that are withheld, as many as drafts are deep; paper 4

    def __post_init__(self) -> None:
        GuessTraining.__post_init__(self)
        check_values(
            self,
            ("window", self.window >= 2 * SINKS, f"{2 * SINKS} or more"),
            ("sliding_window", self.sliding_window >= 1, "1 or more"),
            ("offset", self.offset is None or self.offset >= 0, "0 (none) or more"),
            ("noise", self.noise >= 1, "1 (none) or more"),
        )


class LongContextObjective(GuessObjective):
    """Cross-entropy of the target's own tokens, at positions and depths that are drawn."""

    def __init__(self, config: Any, train: Features) -> None:
        super().__init__(config, train)
        self.longest = int(train.column("positions").max()) + 1

    def shape(self, session: Session) -> dict[str, Any]:
        config, lm = self.config, innermost(session.target)
        self.cache = lm.layer_cache(lm.layers - 1)
        shape: dict[str, Any] = layer_shape(session)
        if shape:
            kept = self.cache.heads
            shape |= {"kv_heads": kept, "asked": shape["heads"] * self.cache.size}
        return {"window": config.sliding_window, **shape}

    def begin(self, head: Any, session: Session) -> None:
        """With branches that say nothing yet."""
        super().begin(head, session)
        lm = innermost(session.target)
        self.offset = self.largest_offset(lm.max_length, lm.embed([0]).device)
        with torch.no_grad():
            for branch in (head.joined, head.told, head.down):
                branch.weight.zero_()

    def largest_offset(self, positions: int | None, device: torch.device) -> int:
        """The largest offset, with a target of so many positions."""
        asked, room = self.config.offset, 0
        if self.cache.rotary:
            room = (positions or FARTHEST + self.longest) - self.longest
        wanted = max(0, min(room, FARTHEST)) if asked is None else asked
        if wanted <= room and movable(self.cache, wanted, device):
            return wanted
        if not asked:
            return 0
        raise CapabilityError(
            f"an offset of {asked} positions was asked for.",
            f"the target has room for {room} behind texts of {self.longest} tokens, and keys are "
            "moved where one rotation holds for all positions.",
            "pass a smaller offset, or leave it out.",
        )

    def learnt(
        self, head: Any, texts: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """At a position and a depth of the step's own; where nothing is learnt, at all depths."""
        noise, rotate = self.config.noise, self.cache.rotated
        if torch.is_grad_enabled():
            late, by = rng.randint(1, noise), rng.randint(0, self.offset)
            moved = offset(texts, by, rng.randint(0, SINKS), self.cache)
            loss, right = head.learn(moved, self.ends, late, rotate)
            return loss, {"right": right}
        found = [head.learn(texts, self.ends, late, rotate) for late in range(1, noise + 1)]
        losses, hits = zip(*found, strict=True)
        named = {f"depth_{depth}": right for depth, right in enumerate(hits, 1)}
        return torch.stack(losses).mean(), named


def offset(texts: dict[str, Tensor], by: int, sinks: int, cache: LayerCache) -> dict[str, Tensor]:
    """The texts with all but their first tokens moved on, and keys that say so."""
    if not by:
        return texts
    positions, keys = texts["positions"], texts["keys"].float()
    moved = torch.full_like(positions, by)
    moved[:, :sinks] = 0
    keys = rotated_on(cache, keys.flatten(0, 1), moved.flatten()).view_as(keys)
    return {**texts, "positions": positions + moved, "keys": keys}


def rotated_on(
    cache: LayerCache, keys: Float[Tensor, "n heads size"], by: Int[Tensor, "n"]
) -> Float[Tensor, "n heads size"]:
    """Keys of the cache as they would be so many positions later."""
    unit = cache.rotated(torch.ones_like(keys[:1]), torch.zeros_like(by[:1]))  # YaRN scales as well
    return cache.rotated(keys, by) / unit


def movable(cache: LayerCache, by: int, device: torch.device) -> bool:
    """Whether keys rotated on are keys of later positions: not where a scaling depends on those."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, cache.heads, cache.size, generator=generator).to(device)
    near, moved = torch.arange(1, 4, device=device), torch.full((3,), by, device=device)
    found = rotated_on(cache, cache.rotated(keys, near), moved)
    return bool(torch.allclose(found, cache.rotated(keys, near + moved), atol=0.05))
