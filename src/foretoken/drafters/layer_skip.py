"""The first layers of the target guess for all of them (LayerSkip, arXiv 2404.16710)."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.contract import LanguageModel
from foretoken.drafters.parts.part_of_target import EarlyExitModel
from foretoken.lm.views.wrapping import layers_of
from foretoken.types import DecodeState


class FirstLayers(EarlyExitModel):
    """A draft model that stops behind a fixed layer."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        exit_layer: int | None = None  # layers that draft; None: a quarter of the model's

    def __init__(self, target: LanguageModel, config: Config | None = None) -> None:
        self.config = config or self.Config()
        chosen = self.config.exit_layer
        self.exit = max(1, layers_of(target) // 4) if chosen is None else chosen
        super().__init__(target, (self.exit,))

    def depth(self, row: DecodeState) -> int:
        return self.exit
