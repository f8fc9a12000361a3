"""A drafter that draws a tree of any shape in any manner, so that rules can be judged alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from foretoken.audit.law import Gap, law_gap
from foretoken.coins import Coins
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.rows import RowDrafter
from foretoken.engine.loop import Engine
from foretoken.lm.table import TableLM
from foretoken.types import Budget, DecodeState, Draft, Draw, KeepGoing, TokenTree, Verifier


class DrawnTree(RowDrafter):
    """Gives every node of level i `widths[i]` children, drawn from a table's law as `draw` says.

    `declared` is what the draft claims about its children: the same, unless an audit lies.
    """

    def __init__(
        self, lm: TableLM, widths: Sequence[int], draw: Draw, declared: Draw | None = None
    ) -> None:
        self.lm, self.widths, self.draw = lm, tuple(widths), draw
        self.declared = declared or draw
        self.draws = frozenset({self.declared})
        self.trees = max(self.widths, default=1) > 1

    def propose_one(self, row: DecodeState, budget: Budget, keep_going: KeepGoing) -> Draft:
        tokens, parents = [row.tokens[-1]], [-1]
        laws: list[Tensor | None] = [None]
        paths: list[list[int]] = [[]]
        level = [0]
        for width in self.widths[: budget.depth]:
            below: list[int] = []
            for node in level:
                if node and tokens[node] in row.params.eos:
                    continue
                context = [*row.tokens, *paths[node]]
                q = row.warp.law(context, self.lm.after(context))
                drawn = self.children(q, width, row.coins)
                laws[node] = self.reported(q)
                for token in drawn:
                    below.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    laws.append(None)
                    paths.append([*paths[node], token])
            level = below
        tree = TokenTree(tuple(tokens), tuple(parents))
        return Draft(tree, self.declared, None if self.declared is Draw.POINT else tuple(laws))

    def children(self, q: Tensor, width: int, coins: Coins) -> list[int]:
        """`width` tokens, or as many as q has."""
        if self.draw is Draw.IID:
            return [coins.draw(q) for _ in range(width)]
        if self.draw is Draw.POINT:
            best = q.topk(min(width, len(q)))
            return [t for p, t in zip(*map(Tensor.tolist, best), strict=True) if p > 0.0]
        drawn: list[int] = []
        left = q.clone()
        while len(drawn) < width and float(left.sum()) > 0.0:
            drawn.append(coins.draw(left / left.sum()))
            left[drawn[-1]] = 0.0
        return drawn

    def reported(self, q: Tensor) -> Tensor:
        """The law the draft says its children came from."""
        return q


def rule_gap(
    rule: Verifier,
    draw: Draw,
    widths: Sequence[int],
    target: TableLM,
    guess: TableLM,
    setting: Mapping[str, Any],
) -> Gap:
    """The law of a rule over trees of one shape, for texts one token longer than they are deep."""

    def build() -> Engine:
        controller = Fixed(Fixed.Config(depth=len(widths), nodes=64))
        return Engine(target, DrawnTree(guess, widths, draw), rule, controller)

    return law_gap(build, target, setting, tokens=len(widths) + 1)
