"""Draft one more level while a trained model expects one of the branches to stand
(improved multi-candidate speculation, arXiv 2409.10644).

The model judges the guess that is about to be drawn, from what is known before it is drawn; the
level that no branch gives much hope is still drawn, since its laws are paid for, and is the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.controllers.steady import Stopping
from foretoken.errors import ConfigError, check_values
from foretoken.heads import decision, store
from foretoken.types import Budget, DecodeState, FinalNorm, Go, Level


class DecisionModel(Stopping):
    """Go on while the model's output for any branch is above the threshold."""

    taps = (FinalNorm(),)
    branches = True

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        head: str | Path = ""  # folder that `foretoken train decision` wrote
        threshold: float = 0.4  # least output that is drafted on with; paper 0.4
        # A drafter with a shape of its own brings its size where nothing is said.
        depth: int = 10  # longest path; paper's code 10
        nodes: int | None = None  # drafted nodes of a tree; None: `depth`, a chain's worth

        def __post_init__(self) -> None:
            if self.head == "":
                raise ConfigError(
                    "depths chosen by a decision model were asked for without a head.",
                    "the head is trained for one pair of models and kept in a folder.",
                    "make one with `foretoken train decision --out DIR`, then pass head=DIR.",
                )
            check_values(
                self,
                ("threshold", 0.0 <= self.threshold <= 1.0, "a probability, 0 to 1"),
                ("depth", self.depth >= 0, "0 (no drafting) or more"),
                ("nodes", self.nodes is None or self.nodes >= 0, "0 (no drafting) or more"),
            )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.head: decision.DecisionHead
        self.head, self.card = store.load(config.head, "decision")
        depth, nodes = config.depth, config.nodes
        self.budget = Budget(depth, depth if nodes is None else nodes)

    def bind(self, drafter: Any) -> None:
        """Refuse a head that was trained for another draft than this one."""
        model = drafter.model
        store.check_fits(self.card, self.config.head, model.hidden_size, model.vocab_size)

    def fresh(self) -> bool:
        """Whether no branch of the draft has any hope left."""
        return False

    def after(self, row: DecodeState, level: Level) -> Go:
        assert level.hidden is not None, "a grower hands over what the rule taps"
        if row.private[self]:
            return Go.STOP
        outputs = self.outputs(level.laws, level.hidden[:, 0])
        row.private[self] = not bool((outputs > self.config.threshold).any())
        return Go.LAST if row.private[self] else Go.ON

    def outputs(self, laws: Tensor, states: Tensor) -> Tensor:
        """The model's output [n] for branches with these laws [n, V] and hidden layers [n, H]."""
        if next(self.head.parameters()).device != states.device:
            self.head.to(states.device)
        soft = self.head.model == "soft"
        seen = states if soft else decision.certainty(laws).to(states.device)
        with torch.no_grad():
            return self.head.likely(seen)
