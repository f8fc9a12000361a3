"""Draft until a rejection is likely, as a trained head sees it (SpecDec++, arXiv 2405.19715).

Drafting as a Markov decision process: going on pays while P(some drafted token is rejected) stays
below a threshold. A head on the draft model's last hidden layer gives the chance a_i that token i
is accepted once all before it are; the product of the a_i of a round's tokens is the chance that
none is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.controllers.steady import Stopping
from foretoken.errors import ConfigError, check_values
from foretoken.heads import store
from foretoken.heads.acceptance import AcceptanceHead
from foretoken.types import Budget, DecodeState, FinalNorm, Go, Level


class AcceptanceThreshold(Stopping):
    """Stop once 1 - a_1 ... a_n exceeds the threshold.

    The hidden layer that comes with the law of token n belongs to token n - 1, so n - 1 tokens are
    judged when n is drawn: the test is one token late, and token n, whose law is paid for, is kept.
    """

    taps = (FinalNorm(),)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        head: str | Path = ""  # folder that `foretoken train acceptance` wrote; there is no default
        threshold: float = 0.7  # largest chance of a rejection that is drafted on with; paper 0.7
        shortest: int = 2  # drafted in any case; paper 2
        depth: int = 20  # longest draft; paper 20

        def __post_init__(self) -> None:
            if self.head == "":
                raise ConfigError(
                    "lengths chosen by an acceptance head were asked for without a head.",
                    "the head is trained for one pair of models and kept in a folder.",
                    "make one with `foretoken train acceptance --out DIR`, then pass head=DIR.",
                )
            check_values(
                self,
                ("threshold", 0.0 <= self.threshold <= 1.0, "a probability, 0 to 1"),
                ("shortest", self.shortest >= 0, "0 or more"),
                ("depth", self.depth >= 0, "0 (no drafting) or more"),
            )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.head: AcceptanceHead
        self.head, self.card = store.load(config.head, "acceptance")
        self.budget = Budget(config.depth, config.depth)

    def bind(self, drafter: Any) -> None:
        """Refuse a head that was trained for another draft than this one."""
        model = drafter.model
        store.check_fits(self.card, self.config.head, model.hidden_size, model.vocab_size)

    def fresh(self) -> Judged:
        return Judged()

    def after(self, row: DecodeState, level: Level) -> Go:
        assert level.hidden is not None, "a grower hands over what the rule taps"
        current: Judged = row.private[self]
        if current.over:
            return Go.STOP
        current.drawn += 1
        if current.drawn > 1:  # the first hidden state belongs to a committed token
            current.unbroken *= self.chance(level.hidden[0, 0])
        doubtful = 1.0 - current.unbroken > self.config.threshold
        current.over = doubtful and current.drawn >= self.config.shortest
        return Go.LAST if current.over else Go.ON

    def chance(self, hidden: Tensor) -> float:
        """How likely the token at this position is accepted."""
        if self.head.out.weight.device != hidden.device:
            self.head.to(hidden.device)
        with torch.no_grad():
            return float(self.head.accepted(hidden))


@dataclass(slots=True)
class Judged:
    """One row's draft in the step under way."""

    drawn: int = 0  # tokens drawn, with the one asked for
    unbroken: float = 1.0  # chance that all tokens judged so far are accepted
    over: bool = False
