"""Draft until the draft model itself is in doubt: the plain yardstick of learned lengths.

`probability` looks at the draft's largest probability (the confidence threshold of transformers'
assisted generation), `entropy` at the entropy of its law in nats (entropy rules such as AdaEDL's,
arXiv 2410.18351, in their simplest form). The doubtful token is still drawn: its law is paid for.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foretoken.controllers.steady import Stopping
from foretoken.errors import check_values
from foretoken.types import Budget, DecodeState, Go, Level

MEASURES = ("probability", "entropy")


class Confidence(Stopping):
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
        super().__init__()
        self.config = config or self.Config()
        depth, nodes = self.config.depth, self.config.nodes
        self.budget = Budget(depth, depth if nodes is None else nodes)

    def fresh(self) -> bool:
        """Whether the draft is in doubt already."""
        return False

    def after(self, row: DecodeState, level: Level) -> Go:
        if row.private[self]:
            return Go.STOP
        row.private[self] = self.doubtful(level.laws[0])
        return Go.LAST if row.private[self] else Go.ON

    def doubtful(self, law: Tensor) -> bool:
        """Whether the next token is too uncertain to draft beyond it."""
        if self.config.measure == "entropy":
            return float(-law.xlogy(law).sum()) > self.config.threshold
        return float(law.max()) < self.config.threshold
