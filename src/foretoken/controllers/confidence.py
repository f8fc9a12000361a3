"""Draft until the draft model itself is in doubt: the plain yardstick of learned lengths.

`probability` looks at the draft's largest probability (the confidence threshold of transformers'
assisted generation), `entropy` at the entropy of its law in nats (entropy rules such as AdaEDL's,
arXiv 2410.18351, in their simplest form). The doubtful token is still drawn: its law is paid for.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.controllers.steady import Judged, Size, Stopping
from foretoken.errors import check_values
from foretoken.types import Level

MEASURES = ("probability", "entropy")


class Confidence(Stopping):
    """Stop behind the first token whose law is too flat."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(Size):
        measure: str = "probability"  # or "entropy"
        threshold: float = 0.4  # least probability, or most nats; 0.4 is transformers' default
        depth: int = 20  # longest draft

        def __post_init__(self) -> None:
            check_values(
                self,
                ("measure", self.measure in MEASURES, " or ".join(MEASURES)),
                ("threshold", self.threshold >= 0.0, "0 or more"),
            )
            Size.__post_init__(self)

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        self.config = config or self.Config()
        self.budget = self.config.budget

    def doubtful(self, level: Level, draft: Judged) -> bool:
        law = level.laws[0]
        if self.config.measure == "entropy":
            return float(-law.xlogy(law).sum()) > self.config.threshold
        return float(law.max()) < self.config.threshold
