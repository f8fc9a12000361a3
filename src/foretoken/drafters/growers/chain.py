"""A draft model guesses a chain, token by token (arXiv 2211.17192, 2302.01318).

At temperature 0 a guess is the draft model's argmax and the candidates are fixed (POINT). Above,
each token is drawn from the row's own warp of the draft model's logits (IID), and whether to draw
at all is asked first: dropping a token after its draw would change the law.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.coins import SeededCoins
from foretoken.contract import StoppingRule
from foretoken.drafters.growers.at_once import AtOnce
from foretoken.drafters.growers.grower import Growth
from foretoken.errors import ConfigError
from foretoken.trees.build import chain
from foretoken.trees.growing import Drawing, Grown, GrowthRule
from foretoken.types import Budget, DecodeState, Draft, Draw, Go, Level, Scores, Traits
from foretoken.warp.plain import law_of, likeliest_of


class ChainGrowth(Growth):
    """One row's chain under way."""

    def __init__(self, row: DecodeState, depth: int) -> None:
        self.row, self.depth = row, depth
        self.greedy: bool = row.warp.greedy
        self.scored = 0  # nodes fed to the model
        self.tokens: list[int] = []
        self.laws: list[Tensor | None] = []
        self.certainty: float | None = None  # of the last token by the draft, where that is known

    def feed(self) -> tuple[Sequence[int], Sequence[int]]:
        return (self.tokens[-1] if self.tokens else self.row.tokens[-1],), (self.scored - 1,)

    def take(self, score: Scores, stop: StoppingRule | None) -> bool:
        self.scored += 1
        try:
            go = self.draw(score, stop)
        except ConfigError:  # the options let nothing follow this path; the target may not take it
            return False
        return (
            go is not Go.STOP
            and self.taken(score)
            and go is Go.ON
            and len(self.tokens) < self.depth
            and self.tokens[-1] not in self.row.params.eos
        )

    def taken(self, score: Scores) -> bool:
        """Asked after each token taken from the scores: whether another may follow it."""
        return True

    def rule(self) -> GrowthRule | None:
        """That of a plain chain, where its tokens are the draft's favourites, or drawn from laws
        that nothing but the temperature shapes."""
        row, drawing = self.row, None
        if not (row.warp.bare if self.greedy else row.warp.uncut):
            return None
        if not self.greedy:
            if not isinstance(row.coins, SeededCoins):
                return None
            coins = row.coins.ahead(self.depth)
            drawing = Drawing(row.params.temperature, row.warp.vocab_size, coins)
        return GrowthRule(
            self.depth, self.depth, branch=1, ends=row.params.eos, greedy=self.greedy,
            drawing=drawing,
        )  # fmt: skip

    def adopt(self, grown: Grown) -> None:
        """Take over a chain that the model went along by itself."""
        self.tokens, self.certainty = grown.tokens[1:], grown.laws[-1]
        self.scored = len(grown.tokens) - (grown.places[-1] < 0)
        if grown.drawn is not None:
            self.laws = list(grown.drawn)
            assert isinstance(self.row.coins, SeededCoins), "they were looked at"
            self.row.coins.skip(self.scored)  # one for every law

    def sure(self, score: Scores) -> float:
        """The probability of the last token, before any sampling option."""
        if self.certainty is not None:
            return self.certainty
        return float(law_of(score.said)[0, self.tokens[-1]])

    def draw(self, score: Scores, stop: StoppingRule | None) -> Go:
        """One more token unless the rule, asked before any coin, says no: the argmax or a draw."""
        row, go = self.row, Go.ON
        law = None if self.greedy else self.law(score)
        if stop is not None:
            level = Level(law_of(score.said) if law is None else law[None], score.hidden)
            go = stop.after(row, level)
        if go is Go.STOP:
            return go
        if law is not None:
            self.tokens.append(row.coins.draw(law))
            self.laws.append(law)
            plain = row.warp.uncut and row.params.temperature == 1.0
            self.certainty = float(law[self.tokens[-1]]) if plain else None
        elif row.warp.bare:
            [[token]], [[self.certainty]] = likeliest_of(score.said, 1)
            if not self.certainty > 0.0:  # the draft's logits are no numbers
                return Go.STOP
            self.tokens.append(token)
        else:
            self.tokens.append(row.warp.choose(row.tokens, score.logits[0], self.tokens))
        return go

    def law(self, score: Scores) -> Tensor:
        """The row's own law after the tokens so far."""
        row = self.row
        if row.warp.uncut:
            return law_of(score.said, row.params.temperature)[0]
        law: Tensor = row.warp.law(row.tokens, score.logits[0], self.tokens)
        return law

    def draft(self) -> Draft:
        tree = chain(self.row.tokens[-1], self.tokens)
        if self.greedy:
            return Draft(tree, Draw.POINT)
        return Draft(tree, Draw.IID, (*self.laws, None))

    def fed(self, path: Sequence[int]) -> list[int]:
        # In a chain, node i is the i-th node fed; the last one drafted was not fed.
        return list(path[: self.scored - 1])


class Chain(AtOnce):
    """One guess per depth."""

    traits = Traits(frozenset({Draw.POINT, Draw.IID}))

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        return ChainGrowth(row, depth)
