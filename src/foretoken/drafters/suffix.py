"""Suffix decoding: follow the most frequent continuations of the recent suffix (arXiv 2411.04975).

Two indexes, one of the request and one of earlier answers. For every match length the frequencies
of what followed give a draft and its score, the accepted tokens to expect; the longer the match,
the longer the draft may be. The draft with the best score is taken. Differences: an answer enters
the common index when it is complete; a draft may be a tree, best first; frequencies come from the
newest occurrences (`SuffixIndex`), and of equally frequent tokens the newest leads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.drafters.suffix_index import Followers, SuffixIndex
from foretoken.drafters.weighing import WeighingDrafter
from foretoken.errors import ConfigError
from foretoken.trees.build import root
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Scores,
    TokenTree,
    Verdict,
)


class SuffixDecoding(WeighingDrafter):
    """A tree or a chain from frequencies, as long as the match deserves."""

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
        for name, least in (("max_match", 1), ("max_spec", 1), ("factor", 0), ("min_prob", 0),
                            ("occurrences", 1), ("remember", 0)):  # fmt: skip
            if getattr(settings, name) < least:
                raise ConfigError(
                    f"{name}={getattr(settings, name)} was asked for.",
                    f"{name} is {least} or more.",
                    f"pass {name}={least} or more, or leave it out.",
                )
        self.trees = settings.branching
        self.answers = SuffixIndex(settings.remember)

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        row.draft = SuffixIndex()
        row.draft.extend(row.tokens)

    def weigh(self, row: DecodeState, budget: Budget) -> tuple[TokenTree, list[float]]:
        own: SuffixIndex = row.draft
        best = Guess(root(row.tokens[-1]), [1.0])
        if min(budget.depth, budget.nodes) > 0:
            # The request's own suffix is an occurrence as well, one that nothing has followed yet.
            best = self.speculate(own, row, budget, unfinished=1)
            if len(self.answers):
                other = self.speculate(self.answers, row, budget)
                best = other if other.score > best.score else best
        return best.tree, best.values

    def speculate(
        self, index: SuffixIndex, row: DecodeState, budget: Budget, unfinished: int = 0
    ) -> Guess:
        """The draft with the best score over all match lengths; ties go to the longer match."""
        settings = self.config
        context = row.tokens[-settings.max_match :]
        found = index.matches(context, settings.max_match, settings.occurrences)
        best = Guess(root(row.tokens[-1]), [1.0])
        for length in sorted({length for _, length in found}, reverse=True):
            # 1e-6: a factor such as 0.1 must not lose a node to rounding
            nodes = int(settings.factor * length + settings.offset + 1e-6)
            nodes = min(nodes, settings.max_spec, budget.nodes)
            if nodes <= best.score:  # no node is worth more than one, and shorter matches get fewer
                break
            places = [place for place, matched in found if matched >= length]
            following = Followers(index, places, min(nodes, budget.depth), row.params.eos)
            total = following.total + unfinished
            choose = following.best if settings.branching else following.chain
            kept = choose(nodes, settings.min_prob * total)
            values = [1.0, *(following.counts[node] / total for node in kept)]
            if sum(values) - 1.0 > best.score:
                best = Guess(_cut(row.tokens[-1], following, kept), values)
        return best

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        for row in rows:
            row.draft.extend(row.tokens[len(row.draft) :])

    def finish(self, row: DecodeState) -> None:
        # Rows that were broken off are not remembered; nor are those that only measure costs.
        if self.config.remember and row.finish is not None:
            self.answers.extend(row.new_tokens)
            self.answers.close()


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft, and how often each of its paths was followed."""

    tree: TokenTree
    values: list[float]

    @property
    def score(self) -> float:
        """The accepted tokens it promises."""
        return sum(self.values) - 1.0


def _cut(token: int, following: Followers, kept: Sequence[int]) -> TokenTree:
    """The kept nodes below the root `token`."""
    place = {node: at for at, node in enumerate((0, *kept))}
    return TokenTree(
        (token, *(following.tokens[node] for node in kept)),
        (-1, *(place[following.parents[node]] for node in kept)),
    )
