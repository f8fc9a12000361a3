"""What drafters of chains share: one forward per depth over all rows that still draft.

At temperature 0 the guess is the draft's argmax and the candidates are fixed (POINT). Above, each
token is drawn from the row's own warp of the draft's logits (IID), and whether to draw at all is
asked first: dropping a token after its draw would change the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from foretoken.asking import LAST, taps_of
from foretoken.drafters.rows import RowDrafter
from foretoken.errors import ConfigError
from foretoken.trees.build import chain
from foretoken.types import Budget, DecodeState, Draft, Draw, KeepGoing, Scores


class ChainDrafter(RowDrafter):
    """Grows one chain per row; override `grow`, and `go_on` for a rule of its own to stop."""

    draws = frozenset({Draw.POINT, Draw.IID})
    max_length: int | None = None  # longest sequence the positions allow

    def grow(self, chains: Sequence[Chain]) -> list[Tensor]:
        """Feed each chain's newest token; logits [1, V] of each."""
        raise NotImplementedError

    def grow_scores(self, chains: Sequence[Chain], taps: tuple[int, ...]) -> list[Scores]:
        """As `grow`, with hidden layers; for drafters that name a `hidden_from`."""
        raise NotImplementedError

    def go_on(self, chain: Chain, logits: Tensor) -> bool:
        """Asked after each token taken from `logits` [V]: whether another may follow it."""
        return True

    def draft(self, chain: Chain) -> Draft:
        """What becomes of a chain that is complete."""
        return chain.draft()

    def advance(self, chain: Chain, score: Scores, keep_going: KeepGoing) -> bool:
        """Take one more token; whether the chain goes on."""
        taken = len(chain.tokens)
        more = chain.extend(score, keep_going)
        if len(chain.tokens) > taken:
            more = self.go_on(chain, score.logits[0]) and more
        return more

    def propose(
        self, rows: Sequence[DecodeState], budgets: Sequence[Budget], keep_going: KeepGoing
    ) -> list[Draft]:
        chains = [
            Chain(row, self.allowed(row, budget), budget.nodes)
            for row, budget in zip(rows, budgets, strict=True)
        ]
        drafting = [one for one in chains if one.depth > 0]
        taps = taps_of(keep_going)
        while drafting:
            if taps:
                scores = self.grow_scores(drafting, taps)
            else:
                scores = [Scores(logits) for logits in self.grow(drafting)]
            drafting = [
                one
                for one, score in zip(drafting, scores, strict=True)
                if self.advance(one, score, keep_going)
            ]
        for one in chains:
            self.drafted(one)
        return [self.draft(one) for one in chains]

    def allowed(self, row: DecodeState, budget: Budget) -> int:
        """Tokens that may be drafted; the last of them is never fed to the draft."""
        depth = min(budget.depth, budget.nodes)
        if self.max_length is not None:
            depth = min(depth, self.max_length - len(row.tokens) + 1)
        return depth

    def drafted(self, chain: Chain) -> None:
        """Called once for each row's finished chain, an empty one too."""
        return None


class Chain:
    """One row's chain while it grows."""

    __slots__ = ("depth", "fed", "feed", "greedy", "laws", "nodes", "notes", "row", "tokens")

    def __init__(self, row: DecodeState, depth: int, nodes: int) -> None:
        self.row, self.depth, self.nodes = row, depth, nodes
        self.fed = 0  # nodes the draft has scored
        self.feed: tuple[int, ...] = (row.tokens[-1],)
        self.tokens: list[int] = []
        self.laws: list[Tensor | None] = []
        self.notes: list[Any] = []  # of the drafter, for its own use
        self.greedy: bool = row.warp.greedy

    @property
    def above(self) -> tuple[int, ...]:
        """The parent of what is fed next."""
        return (self.fed - 1,)

    def extend(self, score: Scores, keep_going: KeepGoing) -> bool:
        """Take one more token after the last node fed; False when the chain ends."""
        self.fed += 1
        hidden = None if score.hidden is None else score.hidden[0]
        try:
            more = self.take(score.logits[0], hidden, keep_going)
        except ConfigError:  # the options let nothing follow this path; the target may not take it
            return False
        if not more:
            return False
        self.feed = (self.tokens[-1],)
        return len(self.tokens) < self.depth and self.tokens[-1] not in self.row.params.eos

    def take(self, logits: Tensor, hidden: Tensor | None, keep_going: KeepGoing) -> bool:
        """Add the argmax at temperature 0, else a draw, unless the controller, asked before any
        coin, says no; whether there may be another one.
        """
        row, answer = self.row, 1
        if self.greedy:
            if not _endless(keep_going):
                answer = _asked(keep_going, row, logits.softmax(-1), hidden)
            if answer:
                self.tokens.append(row.warp.choose(row.tokens, logits, self.tokens))
        else:
            law = row.warp.law(row.tokens, logits, self.tokens)
            answer = _asked(keep_going, row, law, hidden)
            if answer:
                self.laws.append(law)
                self.tokens.append(row.coins.draw(law))
        return bool(answer) and answer != LAST

    def draft(self) -> Draft:
        tree = chain(self.row.tokens[-1], self.tokens)
        if self.greedy:
            return Draft(tree, Draw.POINT)
        return Draft(tree, Draw.IID, (*self.laws, None))


def _asked(keep_going: KeepGoing, row: DecodeState, law: Tensor, hidden: Tensor | None) -> int:
    """The controller's answer; hidden layers only for one that reads them."""
    return keep_going(row, law) if hidden is None else keep_going(row, law, hidden)


def _endless(keep_going: KeepGoing) -> bool:
    """Whether the controller never stops a draft (see `types.endless`): its law can be spared."""
    return getattr(keep_going, "endless", False)
