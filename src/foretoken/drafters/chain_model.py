"""A draft model guesses a chain, token by token (arXiv 2211.17192, 2302.01318).

At temperature 0 the guess is the draft model's argmax and the candidates are fixed (POINT). Above,
each token is drawn from the row's own warp of the draft model's logits (IID), and whether to draw
at all is asked first: dropping a token after its draw would change the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.drafters.rows import RowDrafter
from foretoken.errors import ConfigError
from foretoken.trees.build import chain
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    KeepGoing,
    LanguageModel,
    Scores,
    Verdict,
)


class ChainModel(RowDrafter):
    """One draft forward per depth over all rows that still draft."""

    draws = frozenset({Draw.POINT, Draw.IID})

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        pass

    def __init__(self, draft_lm: LanguageModel, config: Config | None = None) -> None:
        self.lm = draft_lm
        self.config = config or self.Config()

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        # A prompt beyond the draft model's positions is decoded plainly: `allowed` stays at zero.
        if self.lm.max_length is None or len(row.tokens) <= self.lm.max_length:
            self.lm.prefill(row)
        row.draft = 0  # nodes of the draft model's open tree; zero: none is open

    def propose(
        self, rows: Sequence[DecodeState], budgets: Sequence[Budget], keep_going: KeepGoing
    ) -> list[Draft]:
        chains = [_Chain(r, self.allowed(r, b)) for r, b in zip(rows, budgets, strict=True)]
        drafting = [chain for chain in chains if chain.depth > 0]
        while drafting:
            logits = self.lm.grow(
                [chain.row for chain in drafting],
                [chain.feed for chain in drafting],
                [(chain.fed - 1,) for chain in drafting],
            )
            drafting = [
                chain
                for chain, scored in zip(drafting, logits, strict=True)
                if chain.extend(scored[0], keep_going)
            ]
        return [chain.draft() for chain in chains]

    def allowed(self, row: DecodeState, budget: Budget) -> int:
        """Tokens that may be drafted; the last of them is never fed to the draft model."""
        depth = min(budget.depth, budget.nodes)
        if self.lm.max_length is not None:
            depth = min(depth, self.lm.max_length - len(row.tokens) + 1)
        return depth

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        opened, paths = [], []
        for row, verdict in zip(rows, verdicts, strict=True):
            if row.draft and row.finish is None:
                opened.append(row)
                # In a chain, node i is the i-th node fed; the last one drafted was not fed.
                paths.append(verdict.path[: row.draft - 1])
                row.draft = 0
        if opened:
            self.lm.commit(opened, paths)

    def finish(self, row: DecodeState) -> None:
        self.lm.free([row])


class _Chain:
    """One row's chain while it grows."""

    __slots__ = ("depth", "fed", "feed", "greedy", "laws", "row", "tokens")

    def __init__(self, row: DecodeState, depth: int) -> None:
        self.row, self.depth = row, depth
        self.fed = 0  # nodes the draft model has scored
        self.feed: tuple[int, ...] = (row.tokens[-1],)
        self.tokens: list[int] = []
        self.laws: list[Tensor | None] = []
        self.greedy: bool = row.warp.greedy

    def extend(self, logits: Tensor, keep_going: KeepGoing) -> bool:
        """Take one more token from the logits of the last node fed; False when the chain ends."""
        row = self.row
        self.fed += 1
        row.draft = self.fed
        try:
            token = self.next_token(logits, keep_going)
        except ConfigError:  # the options let nothing follow this path; the target may not take it
            return False
        if token is None:
            return False
        self.tokens.append(token)
        self.feed = (token,)
        return len(self.tokens) < self.depth and token not in row.params.eos

    def next_token(self, logits: Tensor, keep_going: KeepGoing) -> int | None:
        """The argmax at temperature 0, else a draw; None, before any coin, to stop here."""
        row = self.row
        if self.greedy:
            if not _endless(keep_going) and not keep_going(row, logits.softmax(-1)):
                return None
            choice: int = row.warp.choose(row.tokens, logits, self.tokens)
            return choice
        law = row.warp.law(row.tokens, logits, self.tokens)
        if not keep_going(row, law):
            return None
        self.laws.append(law)
        return row.coins.draw(law)

    def draft(self) -> Draft:
        tree = chain(self.row.tokens[-1], self.tokens)
        if self.greedy:
            return Draft(tree, Draw.POINT)
        return Draft(tree, Draw.IID, (*self.laws, None))


def _endless(keep_going: KeepGoing) -> bool:
    """Whether the controller never stops a draft (see `types.endless`): its law can be spared."""
    return getattr(keep_going, "endless", False)
