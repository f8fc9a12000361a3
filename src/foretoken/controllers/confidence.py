"""Draft until the draft model itself is in doubt: the plain yardstick of learned lengths.

`probability` looks at the draft's largest probability (the confidence threshold of transformers'
assisted generation), `entropy` at the entropy of its law in nats (entropy rules such as AdaEDL's,
arXiv 2410.18351, in their simplest form). The doubtful token is still drawn: its law is paid for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.asking import LAST
from foretoken.controllers.steady import Steady
from foretoken.errors import check_values
from foretoken.types import Budget, DecodeState

MEASURES = ("probability", "entropy")


class Confidence(Steady):
    """Stop behind the first token whose law is too flat."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        measure: str = "probability"  # or "entropy"
        threshold: float = 0.4  # least probability, or most nats; 0.4 is transformers' default
        depth: int = 20  # longest draft
        nodes: int | None = None  # drafted nodes of a tree; None: `depth`, a chain's worth

        def __post_init__(self) -> None:
            check_values(
                self,
                ("measure", self.measure in MEASURES, " or ".join(MEASURES)),
                ("threshold", self.threshold >= 0.0, "0 or more"),
                ("depth", self.depth >= 0, "0 (no drafting) or more"),
                ("nodes", self.nodes is None or self.nodes >= 0, "0 (no drafting) or more"),
            )

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        depth, nodes = self.config.depth, self.config.nodes
        self.budget = Budget(depth, depth if nodes is None else nodes)

    def budgets(self, rows: Sequence[DecodeState]) -> list[Budget]:
        for row in rows:
            row.control = False  # in doubt already
        return [self.budget] * len(rows)

    def keep_going(self, row: DecodeState, law: Tensor, hidden: Tensor | None = None) -> int:
        if row.control:
            return 0
        row.control = self.doubtful(law)
        return LAST if row.control else 1

    def doubtful(self, law: Tensor) -> bool:
        """Whether the next token is too uncertain to draft beyond it."""
        if self.config.measure == "entropy":
            return float(-law.xlogy(law).sum()) > self.config.threshold
        return float(law.max()) < self.config.threshold
