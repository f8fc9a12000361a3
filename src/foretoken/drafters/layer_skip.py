"""The first layers of the target guess for all of them (LayerSkip, arXiv 2404.16710).

Draft and target share weights, cache and the work of the early layers: see `lm.exits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.drafters.chains import Chain, ChainDrafter
from foretoken.lm.views import exits, layers_of
from foretoken.types import LanguageModel


class LayerSkip(ChainDrafter):
    """A chain drafted behind a fixed layer."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        exit_layer: int | None = None  # layers that draft; None: a quarter of the model's

    def __init__(self, target: LanguageModel, config: Config | None = None) -> None:
        self.config = config or self.Config()
        chosen = self.config.exit_layer
        self.exit = max(1, layers_of(target) // 4) if chosen is None else chosen
        self.view = exits(target, (self.exit,))
        self.max_length = target.max_length

    def grow(self, chains: Sequence[Chain]) -> list[Tensor]:
        return self.view.grow(
            [chain.row for chain in chains],
            [chain.feed for chain in chains],
            [chain.above for chain in chains],
            [self.exit] * len(chains),
        )
