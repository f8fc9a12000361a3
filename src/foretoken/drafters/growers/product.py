"""The likeliest combinations of what a model says about several depths at once, as a tree.

A block model (Medusa's heads, arXiv 2401.10774; a masked block) gives one law per depth, whatever
was chosen above, so a path is worth the product of its tokens' probabilities. The tree holds the
best paths, or those whose ranks a template lists. Candidates are fixed (POINT) at every
temperature: drawn ones would need the law of a whole path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foretoken.contract import BlockModel, Features, StoppingRule
from foretoken.drafters.growers.best_first import BestFirstGrowth, Ranker
from foretoken.drafters.growers.grower import Growth, ModelDrafter
from foretoken.trees.templates import Form
from foretoken.types import Budget, DecodeState, Memory, Rows, Scores, Shape, Traits


class ProductGrowth(BestFirstGrowth):
    """One row's tree: every node of a level has the same candidates below it."""

    def __init__(self, row: DecodeState, depth: int, budget: Budget, ranker: Ranker) -> None:
        super().__init__(row, depth, budget, ranker)
        self.level_price = 0.0  # the laws of all depths came with one forward

    def read(self, logits: Tensor) -> tuple[list[int], Tensor]:
        if self.warp.path_dependent:
            logits = logits.expand(len(self.frontier), -1)
        return super().read(logits)


class Product(ModelDrafter):
    """Best-first growth without a forward per level, or a static template of ranks."""

    traits = Traits(shape=Shape.TREE, memory=Memory.ENGINE, prices=True)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        branch: int = 8  # candidates considered per depth
        calibrate: bool = True  # correct the model's confidence by what was accepted of it
        # None chooses the best paths; (3, 2, 1) gives every node of a depth that many children;
        # ((0,), (1,), (0, 0)) lists paths of ranks, as Medusa's files do
        template: Form | None = None

    def __init__(self, model: BlockModel, config: Config | None = None) -> None:
        super().__init__(model)
        self.block = model
        self.config = config = config or self.Config()
        self.ranker = Ranker(config.branch, config.calibrate, config.template)

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        return ProductGrowth(row, min(depth, self.block.depth), budget, self.ranker)

    def grow(self, growths: Sequence[Any], stop: StoppingRule | None) -> None:
        """All levels from one answer of the block model."""
        if not growths:
            return
        depth = max([one.depth for one in growths])
        found = self.block.laws([one.row for one in growths], depth)
        for one, laws in zip(growths, found, strict=True):
            for logits in laws:
                one.feed()
                if not one.take(Scores(logits[None]), stop):
                    break

    def follow(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        self.block.keep(rows, features)
