"""Suffix decoding: follow the most frequent continuations of the recent suffix (arXiv 2411.04975).

Two indexes, one of the request and one of earlier answers. For every match length the frequencies
of what followed give a draft and its score, the accepted tokens to expect; the longer the match,
the longer the draft may be. The draft with the best score is taken. Differences: an answer enters
the common index when it is complete; a draft may be a tree, best first; frequencies come from the
newest occurrences (`SuffixIndex`), and of equally frequent tokens the newest leads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretoken.contract import Features
from foretoken.drafters.parts.chances import affordable
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.drafters.parts.suffix_index import Followers, SuffixIndex
from foretoken.errors import check_values
from foretoken.trees.build import undrafted
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Memory,
    Shape,
    Step,
    TokenTree,
    Traits,
)


class SuffixDecoding(RowDrafter):
    """A tree or a chain from frequencies, as long as the match deserves."""

    traits = Traits(shape=Shape.TREE, memory=Memory.ENGINE, prices=True)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        max_match: int = 24  # longest suffix told apart; the production engines' default
        max_spec: int = 32  # most nodes of a draft, whatever the budget; paper default
        factor: float = 1.0  # nodes of a draft per token matched; paper default
        offset: float = 0.0  # added to that; paper default
        min_prob: float = 0.1  # paths less frequent than this are not drafted; paper default
        branching: bool = True  # a tree; False: a chain of the most frequent tokens, as published
        occurrences: int = 32  # newest occurrences counted
        # tokens of earlier answers kept, for all requests together; 0: none, so that nobody can
        # tell from the speed of an answer what others were answered
        remember: int = 200_000

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        settings = self.config
        check_values(
            settings,
            *(
                (name, getattr(settings, name) >= least, f"{least} or more")
                for name, least in (("max_match", 1), ("max_spec", 1), ("factor", 0),
                                    ("min_prob", 0), ("occurrences", 1), ("remember", 0))
            ),
        )  # fmt: skip
        shape = Shape.TREE if settings.branching else Shape.CHAIN
        memory = Memory.ENGINE if settings.remember else Memory.ROW
        self.traits = replace(self.traits, shape=shape, memory=memory)
        self.answers = SuffixIndex(settings.remember)

    def start(self, row: DecodeState, seen: Features | None) -> None:
        own = row.private[self] = SuffixIndex()
        own.extend(row.tokens)

    def propose_one(self, row: DecodeState, budget: Budget) -> Draft:
        if min(budget.depth, budget.nodes) <= 0:
            return undrafted(row)
        # The request's own suffix is an occurrence as well, one that nothing has followed yet.
        score, best = self.speculate(row.private[self], row, budget, unfinished=1)
        if len(self.answers):
            other, draft = self.speculate(self.answers, row, budget)
            best = draft if other > score else best
        return affordable(best, budget)

    def speculate(
        self, index: SuffixIndex, row: DecodeState, budget: Budget, unfinished: int = 0
    ) -> tuple[float, Draft]:
        """The most accepted tokens that a draft promises over all match lengths, and that draft;
        ties go to the longer match.
        """
        settings = self.config
        context = row.tokens[-settings.max_match :]
        found = index.matches(context, settings.max_match, settings.occurrences)
        best, score = undrafted(row), 0.0
        for length in sorted({length for _, length in found}, reverse=True):
            # 1e-6: a factor such as 0.1 must not lose a node to rounding
            nodes = int(settings.factor * length + settings.offset + 1e-6)
            nodes = min(nodes, settings.max_spec, budget.nodes)
            if nodes <= score:  # no node is worth more than one, and shorter matches get fewer
                break
            places = [place for place, matched in found if matched >= length]
            following = Followers(index, places, min(nodes, budget.depth), row.params.eos)
            total = following.total + unfinished
            choose = following.best if settings.branching else following.chain
            kept = choose(nodes, settings.min_prob * total)
            chances = (1.0, *(following.counts[node] / total for node in kept))
            if sum(chances) - 1.0 > score:
                score = sum(chances) - 1.0
                tree = _cut(row.tokens[-1], following, kept)
                best = Draft(tree, Draw.POINT, chances=chances)
        return score, best

    def observe(self, step: Step) -> None:
        for row in step.rows:
            own: SuffixIndex = row.private[self]
            own.extend(row.tokens[len(own) :])

    def finish(self, row: DecodeState) -> None:
        super().finish(row)
        # Rows that were broken off are not remembered; nor are those that only measure costs.
        whole = row.finish is not None and row.finish.reason not in ("cancelled", "error")
        if self.config.remember and whole:
            self.answers.extend(row.new_tokens)
            self.answers.close()


def _cut(token: int, following: Followers, kept: Sequence[int]) -> TokenTree:
    """The kept nodes below the root `token`."""
    place = {node: at for at, node in enumerate((0, *kept))}
    return TokenTree(
        (token, *(following.tokens[node] for node in kept)),
        (-1, *(place[following.parents[node]] for node in kept)),
    )
