"""Draft until a rejection is likely, as a trained head sees it (SpecDec++, arXiv 2405.19715).

Drafting as a Markov decision process: going on pays while P(some drafted token is rejected) stays
below a threshold. A head on the draft model's last hidden layer gives the chance a_i that token i
is accepted once all before it are; the product of the a_i of a round's tokens is the chance that
none is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from foretoken.controllers.steady import Judged
from foretoken.controllers.stopping_head import StoppingHead, require_head
from foretoken.errors import check_values
from foretoken.types import Budget, Level


@dataclass(slots=True)
class Chain(Judged):
    """One row's chain in the step under way."""

    drawn: int = 0  # tokens drawn, with the one asked for
    unbroken: float = 1.0  # chance that all tokens judged so far are accepted


class AcceptanceThreshold(StoppingHead):
    """Stop once 1 - a_1 ... a_n exceeds the threshold.

    The hidden layer that comes with the law of token n belongs to token n - 1, so n - 1 tokens are
    judged when n is drawn: the test is one token late, and token n, whose law is paid for, is kept.
    """

    kind = "acceptance"

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        head: str | Path = ""  # folder that `foretoken train acceptance` wrote; there is no default
        threshold: float = 0.7  # largest chance of a rejection that is drafted on with; paper 0.7
        shortest: int = 2  # drafted in any case; paper 2
        depth: int = 20  # longest draft; paper 20

        def __post_init__(self) -> None:
            require_head(self.head, "acceptance", "lengths chosen by an acceptance head")
            check_values(
                self,
                ("threshold", 0.0 <= self.threshold <= 1.0, "a probability, 0 to 1"),
                ("shortest", self.shortest >= 0, "0 or more"),
                ("depth", self.depth >= 0, "0 (no drafting) or more"),
            )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.budget = Budget(config.depth, config.depth)

    def fresh(self) -> Chain:
        return Chain()

    def doubtful(self, level: Level, draft: Chain) -> bool:
        draft.drawn += 1
        if draft.drawn > 1:  # the first hidden state belongs to a committed token
            with torch.no_grad():
                draft.unbroken *= float(self.head.accepted(self.states(level)[0]))
        return draft.drawn >= self.config.shortest and (
            1.0 - draft.unbroken > self.config.threshold
        )
