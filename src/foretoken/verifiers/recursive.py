"""Recursive rejection sampling over the children of each node.

Leviathan et al. (arXiv 2211.17192) for one child; several independent ones as in SpecInfer and
MCSD, several distinct ones as in RSD (arXiv 2402.14160): after each rejection the target's law
becomes the residual norm(relu(p - q)), and q loses the rejected token if it was drawn without
replacement. A fixed child is a draw from the law that always gives it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.coins import Coins
from foretoken.types import Draft, Draw, Scores, Verdict
from foretoken.verifiers.point import walk


class Recursive:
    """Try the children of a node in draw order, descend into the first accepted one."""

    exact_for = frozenset({Draw.POINT, Draw.IID, Draw.DISTINCT})
    chains_only = False

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        pass

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def verify(self, draft: Draft, scores: Scores, coins: Coins) -> Verdict:
        laws = scores.p
        assert laws is not None, "the loop sets the laws before a verdict is asked"
        if laws.greedy:
            return walk(draft, scores, coins)
        children = draft.tree.children()
        path: list[int] = []
        node = 0
        while children[node]:
            child, left = self.choose(draft, node, children[node], laws[node], coins)
            if child is None:
                return Verdict(tuple(path), coins.draw(left))
            path.append(child)
            node = child
        return Verdict(tuple(path), laws.draw(node, coins))

    def choose(
        self, draft: Draft, node: int, children: list[int], p: Tensor, coins: Coins
    ) -> tuple[int | None, Tensor]:
        """The accepted child of `node`, or None and the law of the token to emit instead."""
        tokens = draft.tree.tokens
        q = None if draft.q is None else draft.q[node]
        for child in children:
            token = tokens[child]
            if draft.draw is Draw.POINT:
                q = fixed(token, p)
            assert q is not None, "sampled children come with the law they were drawn from"
            chance = float(q[token])
            if chance <= 0.0:  # q ran out: nothing is known of the candidates that are left
                break
            if coins.flip(float(p[token]) / chance):
                return child, p
            rest = self.residual(p, q)
            if rest is None:
                break
            p = rest
            if draft.draw is Draw.DISTINCT:
                q = self.without(q, token)
        return None, p

    def residual(self, p: Tensor, q: Tensor) -> Tensor | None:
        """What the target still owes after a rejection; None where one has probability zero."""
        rest = (p - q).clamp_(min=0.0)
        mass = rest.sum()
        return rest / mass if float(mass) > 0.0 else None

    def without(self, q: Tensor, token: int) -> Tensor:
        """q of the next draw without replacement."""
        return without(q, token)


def without(q: Tensor, token: int) -> Tensor:
    """q without one token; all zero when that was all it had."""
    rest = q.clone()
    rest[token] = 0.0
    mass = rest.sum()
    return rest / mass if float(mass) > 0.0 else rest


def fixed(token: int, like: Tensor) -> Tensor:
    """The law of a candidate that was not drawn at all."""
    q = torch.zeros_like(like)
    q[token] = 1.0
    return q
