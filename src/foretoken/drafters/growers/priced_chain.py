"""A chain that goes on as long as another token is worth its price, by what the draft is sure of.

Without prices it is the plain chain. With prices the chance that the target comes as far as each
token is followed along the chain: the draft's probability of the token, as experience corrects it.
One more token is drafted if that chance, times how often chains go on, is worth a draft forward and
a node to score: goodput (arXiv 2406.14066) token by token. Tokens stay once they are drawn, and
only tokens drawn before decide, so the law is the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from foretoken.contract import DraftModel
from foretoken.drafters.growers.chain import Chain, ChainGrowth
from foretoken.drafters.growers.grower import Growth, Opened
from foretoken.drafters.parts.experience import Experience
from foretoken.trees.growing import Grown, GrowthRule
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Memory,
    Prices,
    Scores,
    Traits,
    Verdict,
)


class PricedGrowth(ChainGrowth):
    """One row's chain under way, which ends where one more token would not pay."""

    def __init__(self, row: DecodeState, depth: int, prices: Prices, known: Experience) -> None:
        super().__init__(row, depth)
        self.prices, self.known = prices, known
        self.sure_of = [1.0]  # the draft's probability of each node
        self.chances = [1.0]  # that the target comes as far as each node

    def taken(self, score: Scores) -> bool:
        sure = self.sure(score)
        self.sure_of.append(sure)
        self.chances.append(self.chances[-1] * self.known.calibration.chance(sure, 0, self.greedy))
        return self.chances[-1] * self.known.share >= self.prices.one_more(len(self.tokens))

    def rule(self) -> GrowthRule | None:
        rule = super().rule()
        if rule is None:
            return None
        bars = [self.prices.one_more(drafted) for drafted in range(self.depth + 1)]
        return replace(rule, bars=bars, share=self.known.share, calibration=self.known.calibration)

    def adopt(self, grown: Grown) -> None:
        super().adopt(grown)
        self.sure_of, self.chances = grown.laws, grown.values

    def draft(self) -> Draft:
        return replace(super().draft(), chances=tuple(self.chances))

    def judged(self, draft: Draft, verdict: Verdict) -> None:
        ranks = [0] * len(self.sure_of)
        self.known.calibration.judged(draft, verdict.path, self.sure_of, ranks, self.greedy)
        self.known.tried(len(verdict.path), len(draft.tree) - 1)


@dataclass(slots=True)
class Drafting(Opened):
    """What is known of a row's drafts."""

    experience: Experience = field(kw_only=True)


class PricedChain(Chain):
    """One guess per depth, for as long as the next one is worth its price.

    All rows share their experience, but for those whose seed has to repeat their text.
    """

    traits = Traits(frozenset({Draw.POINT, Draw.IID}), memory=Memory.ENGINE, prices=True)

    def __init__(self, model: DraftModel, config: Any = None) -> None:
        super().__init__(model, config)
        self.shared = Experience()

    def opened(self, row: DecodeState) -> Opened:
        return Drafting(experience=Experience() if row.repeatable else self.shared)

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        if budget.prices is None:
            return super().begin(row, depth, budget)
        state: Drafting = row.private[self]
        return PricedGrowth(row, depth, budget.prices, state.experience)
