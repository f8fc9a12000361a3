"""Walk the tree with the target's own draws: exact for every fixed candidate set.

At each node a token is drawn from p; if a child carries it, the walk goes on there, otherwise that
token is the correction. Nothing about the drafter's law is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foretoken.coins import Coins
from foretoken.trees.twins import places
from foretoken.types import Draft, Draw, Laws, Scores, Verdict


class Point:
    """Descend to the child that carries the drawn token."""

    exact_for: frozenset[Draw] = frozenset({Draw.POINT})
    chains_only = False

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        pass

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def verify(self, draft: Draft, scores: Scores, coins: Coins) -> Verdict:
        return walk(draft, scores, coins)


class ForDrawn(Point):
    """Base of rules for drawn candidates; where none was drawn, or all is certain, they walk."""

    def verify(self, draft: Draft, scores: Scores, coins: Coins) -> Verdict:
        laws = scores.p
        assert laws is not None, "the loop sets the laws before a verdict is asked"
        if len(draft.tree) == 1 or laws.greedy or draft.draw is Draw.POINT:
            return walk(draft, scores, coins)
        return self.judge(draft, laws, coins)

    def judge(self, draft: Draft, laws: Laws, coins: Coins) -> Verdict:
        """The rule itself, for candidates drawn from known laws."""
        raise NotImplementedError


def walk(draft: Draft, scores: Scores, coins: Coins) -> Verdict:
    """The walk itself; other rules use it for point drafts and at temperature 0."""
    laws = scores.p
    assert laws is not None, "the loop sets the laws before a verdict is asked"
    tokens, parents = draft.tree.tokens, draft.tree.parents
    path: list[int] = []
    node, size = 0, len(tokens)
    while True:
        token = laws.draw(node, coins)
        for child in range(node + 1, size):  # parents come before children
            if parents[child] == node and tokens[child] == token:
                break
        else:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def children_of(draft: Draft) -> list[list[int]]:
    """The children of each node as a rule tries them; independent siblings may share theirs."""
    return places(draft.tree) if draft.draw is Draw.IID else draft.tree.children()


def drawn_from(draft: Draft, node: int) -> Tensor:
    """q [V] that a node and its siblings were drawn from."""
    law = None if draft.q is None else draft.q[draft.tree.parents[node]]
    assert law is not None, "sampled children come with the law they were drawn from"
    return law
