"""A draft model guesses a chain, token by token (arXiv 2211.17192, 2302.01318).

At temperature 0 a guess is the draft model's argmax and the candidates are fixed (POINT). Above,
each token is drawn from the row's own warp of the draft model's logits (IID), and whether to draw
at all is asked first: dropping a token after its draw would change the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from torch import Tensor

from foretoken.contract import StoppingRule
from foretoken.drafters.growers.grower import Grower, Growth
from foretoken.errors import ConfigError
from foretoken.trees.build import chain
from foretoken.types import Budget, DecodeState, Draft, Draw, Go, Level, Scores, Traits


class ChainGrowth(Growth):
    """One row's chain under way."""

    def __init__(self, row: DecodeState, depth: int) -> None:
        self.row, self.depth = row, depth
        self.greedy: bool = row.warp.greedy
        self.scored = 0  # nodes fed to the model
        self.tokens: list[int] = []
        self.laws: list[Tensor | None] = []

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

    def sure(self, score: Scores) -> float:
        """The probability of the last token, before any sampling option."""
        chosen = float(score.logits[0, self.tokens[-1]])
        told = score.logits if score.few is None else score.few.logits  # the others have none
        return exp(chosen - float(told[0].float().logsumexp(-1)))

    def draw(self, score: Scores, stop: StoppingRule | None) -> Go:
        """One more token unless the rule, asked before any coin, says no: the argmax or a draw."""
        row, logits, go = self.row, score.logits[0], Go.ON
        if self.greedy:
            if stop is not None:
                go = stop.after(row, Level(score.logits.softmax(-1), score.hidden))
            if go is not Go.STOP:
                few = score.few if row.warp.bare else None
                if few is not None:
                    best = row.warp.choose(row.tokens, few.logits[0])
                    self.tokens.append(int(few.tokens[best]))
                else:
                    self.tokens.append(row.warp.choose(row.tokens, logits, self.tokens))
            return go
        law = row.warp.law(row.tokens, logits, self.tokens)
        if stop is not None:
            go = stop.after(row, Level(law[None], score.hidden))
        if go is not Go.STOP:
            self.laws.append(law)
            self.tokens.append(row.coins.draw(law))
        return go

    def draft(self) -> Draft:
        tree = chain(self.row.tokens[-1], self.tokens)
        if self.greedy:
            return Draft(tree, Draw.POINT)
        return Draft(tree, Draw.IID, (*self.laws, None))

    def fed(self, path: Sequence[int]) -> list[int]:
        # In a chain, node i is the i-th node fed; the last one drafted was not fed.
        return list(path[: self.scored - 1])


class Chain(Grower):
    """One guess per depth."""

    traits = Traits(frozenset({Draw.POINT, Draw.IID}))

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        return ChainGrowth(row, depth)
