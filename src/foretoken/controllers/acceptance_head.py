"""Draft until a rejection is likely, as a trained head sees it (SpecDec++, arXiv 2405.19715).

Drafting as a Markov decision process: going on pays while P(some drafted token is rejected) stays
below a threshold. A head on the draft model's last hidden layer gives the chance a_i that token i
is accepted once all before it are; the product of the a_i of a round's tokens is the chance that
none is rejected.
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
from foretoken.heads import acceptance
from foretoken.heads.store import check_fits
from foretoken.types import (
    NORMED,
    Budget,
    DecodeState,
    LanguageModel,
)


class AcceptanceThreshold(Steady):
    """Stop once 1 - a_1 ... a_n exceeds the threshold.

    The hidden layer that comes with the law of token n belongs to token n - 1, so n - 1 tokens are
    judged when n is drawn: the test is one token late, and token n, whose law is paid for, is kept.
    """

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
        self.config = config
        self.head, self.card = acceptance.load(config.head)
        self.budget = Budget(config.depth, config.depth)

    def read_from(self, draft: LanguageModel) -> None:
        """Refuse a head that was trained for another draft model than this one."""
        check_fits(self.card, self.config.head, draft.hidden_size, draft.vocab_size)

    def budgets(self, rows: Sequence[DecodeState]) -> list[Budget]:
        for row in rows:
            row.control = _Round()
        return [self.budget] * len(rows)

    @reading(NORMED)
    def keep_going(self, row: DecodeState, law: Tensor, hidden: Tensor | None = None) -> int:
        assert hidden is not None, "the drafter hands over what this rule is marked as reading"
        current: _Round = row.control
        if current.over:
            return 0
        current.drawn += 1
        if current.drawn > 1:  # the first hidden layer belongs to a committed token
            current.unbroken *= self.chance(hidden[0])
        doubtful = 1.0 - current.unbroken > self.config.threshold
        current.over = doubtful and current.drawn >= self.config.shortest
        return LAST if current.over else 1

    def chance(self, hidden: Tensor) -> float:
        """How likely the token at this position is accepted."""
        if self.head.out.weight.device != hidden.device:
            self.head.to(hidden.device)
        with torch.no_grad():
            return float(self.head.accepted(hidden))


@dataclass(slots=True)
class _Round:
    """One row's draft in the step under way."""

    drawn: int = 0  # tokens drawn, with the one asked for
    unbroken: float = 1.0  # chance that all tokens judged so far are accepted
    over: bool = False
