"""Walk the tree with the target's own draws: exact for every fixed candidate set.

At each node a token is drawn from p; if a child carries it, the walk goes on there, otherwise that
token is the correction. Nothing about the drafter's law is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from foretoken.coins import Coins, SeededCoins, no_law
from foretoken.contract import NoOptions
from foretoken.trees.duplicates import places
from foretoken.types import Draft, Draw, Laws, Rows, Scores, Shape, Verdict
from foretoken.warp.residual import without


class Rule:
    """Base of rules that judge row by row; override `judge_row`."""

    exact_for: frozenset[Draw]
    lossy_for: frozenset[Draw] = frozenset()
    shape = Shape.TREE
    why = ""  # what makes the text follow another law, for rules that are lossy for some drafts

    Config = NoOptions

    def __init__(self, config: NoOptions | None = None) -> None:
        """Nothing is chosen."""

    def verify(
        self, rows: Rows, drafts: Sequence[Draft], scores: Sequence[Scores]
    ) -> list[Verdict]:
        """One verdict per row; rules that judge many rows at once override this."""
        return [
            self.judge_row(draft, score, row.coins)
            for row, draft, score in zip(rows, drafts, scores, strict=True)
        ]

    def judge_row(self, draft: Draft, scores: Scores, coins: Coins) -> Verdict:
        """The rule for one row."""
        raise NotImplementedError


class Point(Rule):
    """Descend to the child that carries the drawn token."""

    exact_for = frozenset({Draw.POINT})

    def verify(
        self, rows: Rows, drafts: Sequence[Draft], scores: Sequence[Scores]
    ) -> list[Verdict]:
        """On a device all rows are drawn for together: one read from it, however many there are.

        Options that are called are asked about nodes that are reached only: behind others they may
        have no answer.
        """
        called = any(row.params.processors or row.params.grammar for row in rows)
        seeded = all(isinstance(row.coins, SeededCoins) for row in rows)
        if called or not seeded or scores[0].logits.is_cpu:
            return super().verify(rows, drafts, scores)
        return walk_together(rows, drafts, scores)

    def judge_row(self, draft: Draft, scores: Scores, coins: Coins) -> Verdict:
        return walk(draft, scores, coins)


class ForDrawn(Rule):
    """Base of rules for drawn candidates; where none was drawn, or all is certain, they walk."""

    def judge_row(self, draft: Draft, scores: Scores, coins: Coins) -> Verdict:
        laws = scores.p
        assert laws is not None, "the engine sets the laws before a verdict is asked"
        if len(draft.tree) == 1 or laws.greedy or draft.draw is Draw.POINT:
            return walk(draft, scores, coins)
        return self.judge(beside(draft, scores.logits.device), laws, coins)

    def judge(self, draft: Draft, laws: Laws, coins: Coins) -> Verdict:
        """The rule itself, for candidates drawn from known laws."""
        raise NotImplementedError

    def without(self, q: Tensor, token: int) -> Tensor | None:
        """q of the next draw without replacement; None where it has run out."""
        return without(q, token)


def walk(draft: Draft, scores: Scores, coins: Coins) -> Verdict:
    """The walk itself; other rules use it for point drafts and at temperature 0."""
    laws = scores.p
    assert laws is not None, "the engine sets the laws before a verdict is asked"
    return descend(draft, partial(laws.draw, coins=coins))


def descend(draft: Draft, said: Callable[[int], int]) -> Verdict:
    """Follow what is `said` at a node, from the root to the last node that it leads to."""
    tokens, parents = draft.tree.tokens, draft.tree.parents
    path: list[int] = []
    node, size = 0, len(tokens)
    while True:
        token = said(node)
        for child in range(node + 1, size):  # parents come before children
            if parents[child] == node and tokens[child] == token:
                break
        else:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def walk_together(rows: Rows, drafts: Sequence[Draft], scores: Sequence[Scores]) -> list[Verdict]:
    """The walks of all rows from tokens drawn at every node: of one depth, only one is used.

    Each node is drawn for with the coin that its depth will use, so the verdicts are those of
    `walk`, and no verdict waits for another's token. Greedy rows are walked: their tokens were read
    together already, and at a node that is not reached there may be none.
    """
    drawn: list[Tensor] = []
    for row, draft, score in zip(rows, drafts, scores, strict=True):
        if row.warp.greedy:
            continue
        laws = score.p
        assert laws is not None, "the engine sets the laws before a verdict is asked"
        stacked = torch.stack([laws[node] for node in range(len(draft.tree))])  # [N, V]
        assert isinstance(row.coins, SeededCoins), "only seeded coins can be looked at ahead"
        drawn.append(row.coins.draw_many(stacked, draft.tree.depths()))
    said: list[int] = torch.cat(drawn).tolist() if drawn else []  # the one read
    verdicts, at = [], 0
    for row, draft, score in zip(rows, drafts, scores, strict=True):
        if row.warp.greedy:
            verdicts.append(walk(draft, score, row.coins))
            continue
        tokens = said[at : at + len(draft.tree)]
        at += len(draft.tree)
        verdicts.append(descend(draft, partial(met, tokens)))
        row.coins.skip(len(verdicts[-1].path) + 1)  # type: ignore[attr-defined]
    return verdicts


def met(tokens: Sequence[int], node: int) -> int:
    """What was said at a node that a walk reaches; ConfigError where its law was NaN."""
    if tokens[node] < 0:
        raise no_law()
    return tokens[node]


def beside(draft: Draft, device: torch.device) -> Draft:
    """The draft with its laws on the target's device: a draft model may have one of its own."""
    if draft.q is None or all(law is None or law.device == device for law in draft.q):
        return draft
    return replace(draft, q=tuple(None if law is None else law.to(device) for law in draft.q))


def children_of(draft: Draft) -> list[list[int]]:
    """The children of each node as a rule tries them; independent siblings may share theirs."""
    return places(draft.tree) if draft.draw is Draw.IID else draft.tree.children()


def drawn_from(draft: Draft, node: int) -> Tensor:
    """q [V] that a node and its siblings were drawn from."""
    law = None if draft.q is None else draft.q[draft.tree.parents[node]]
    assert law is not None, "sampled children come with the law they were drawn from"
    return law
