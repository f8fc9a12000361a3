"""Draft one more level while a trained model expects one of the branches to stand
(improved multi-candidate speculation, arXiv 2409.10644).

The model judges the guess that is about to be drawn, from what is known before it is drawn; the
level that no branch gives much hope is still drawn, since its laws are paid for, and is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foretoken.asking import LAST, reading
from foretoken.controllers.steady import Steady
from foretoken.errors import ConfigError, check_values
from foretoken.heads import decision
from foretoken.heads.store import check_fits
from foretoken.types import (
    NORMED,
    Budget,
    DecodeState,
    LanguageModel,
)


class DecisionModel(Steady):
    """Go on while the model's output for any branch is above the threshold."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        head: str | Path = ""  # folder that `foretoken train acceptance --for mcsd` wrote
        threshold: float = 0.4  # least output that is drafted on with; paper 0.4
        # A drafter with a shape of its own brings its size where nothing is said.
        depth: int = 10  # longest path; paper's code 10
        nodes: int | None = None  # drafted nodes of a tree; None: `depth`, a chain's worth

        def __post_init__(self) -> None:
            if self.head == "":
                raise ConfigError(
                    "depths chosen by a decision model were asked for without a head.",
                    "the head is trained for one pair of models and kept in a folder.",
                    "make one with `foretoken train acceptance --for mcsd --out DIR`, then pass "
                    "head=DIR.",
                )
            check_values(
                self,
                ("threshold", 0.0 <= self.threshold <= 1.0, "a probability, 0 to 1"),
                ("depth", self.depth >= 0, "0 (no drafting) or more"),
                ("nodes", self.nodes is None or self.nodes >= 0, "0 (no drafting) or more"),
            )

    def __init__(self, config: Config) -> None:
        self.config = config
        self.head, self.card = decision.load(config.head)
        depth, nodes = config.depth, config.nodes
        self.budget = Budget(depth, depth if nodes is None else nodes)

    def read_from(self, draft: LanguageModel) -> None:
        """Refuse a head that was trained for another draft model than this one."""
        check_fits(self.card, self.config.head, draft.hidden_size, draft.vocab_size)

    def budgets(self, rows: Sequence[DecodeState]) -> list[Budget]:
        for row in rows:
            row.control = False  # hopeless already
        return [self.budget] * len(rows)

    @reading(NORMED, branches=True)
    def keep_going(self, row: DecodeState, law: Tensor, hidden: Tensor | None = None) -> int:
        assert hidden is not None, "the drafter hands over what this rule is marked as reading"
        if row.control:
            return 0
        # A chain's one branch comes without the dimension of branches.
        laws, states = law.reshape(-1, law.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
        row.control = not bool((self.outputs(laws, states) > self.config.threshold).any())
        return LAST if row.control else 1

    def outputs(self, laws: Tensor, states: Tensor) -> Tensor:
        """The model's output [n] for branches with these laws [n, V] and hidden layers [n, H]."""
        if next(self.head.parameters()).device != states.device:
            self.head.to(states.device)
        soft = self.head.model == "soft"
        seen = states if soft else decision.certainty(laws).to(states.device)
        with torch.no_grad():
            return self.head.likely(seen)
