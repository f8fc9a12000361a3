"""Draft one more level while a trained model expects one of the branches to stand
(improved multi-candidate speculation, arXiv 2409.10644).

The model judges the guess that is about to be drawn, from what is known before it is drawn; the
level that no branch gives much hope is still drawn, since its laws are paid for, and is the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from foretoken.controllers.steady import Judged, Size
from foretoken.controllers.stopping_head import StoppingHead, require_head
from foretoken.errors import check_values
from foretoken.heads.decision import certainty
from foretoken.types import Level


class DecisionModel(StoppingHead):
    """Go on while the model's output for any branch is above the threshold."""

    kind = "decision"
    branches = True

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(Size):
        head: str | Path = ""  # folder that `foretoken train decision` wrote
        threshold: float = 0.4  # least output that is drafted on with; paper 0.4
        depth: int = 10  # longest path, where no shape says it; paper's code 10

        def __post_init__(self) -> None:
            require_head(self.head, "decision", "depths chosen by a decision model")
            check_values(self, ("threshold", 0.0 <= self.threshold <= 1.0, "a probability, 0 to 1"))
            Size.__post_init__(self)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config, self.budget = config, config.budget

    def doubtful(self, level: Level, draft: Judged) -> bool:
        seen = states = self.states(level)
        if self.head.model == "hard":
            seen = certainty(level.laws).to(states.device)
        with torch.no_grad():
            return not bool((self.head.likely(seen) > self.config.threshold).any())
