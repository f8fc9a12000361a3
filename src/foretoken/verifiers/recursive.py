"""Recursive rejection sampling over the children of each node.

Leviathan et al. (arXiv 2211.17192) for one child; several independent ones as in SpecInfer and
MCSD, several distinct ones as in RSD (arXiv 2402.14160): after each rejection the target's law
becomes the residual norm(relu(p - q)), and q loses the rejected token if it was drawn without
replacement.
"""

from __future__ import annotations

from torch import Tensor

from foretoken.coins import Coins
from foretoken.types import Draft, Draw, Laws, Verdict
from foretoken.verifiers.point import ForDrawn, children_of, drawn_from
from foretoken.warp.residual import residual


class Recursive(ForDrawn):
    """Try the children of a node in draw order, descend into the first accepted one."""

    exact_for: frozenset[Draw] = frozenset({Draw.POINT, Draw.IID, Draw.DISTINCT})

    def judge(self, draft: Draft, laws: Laws, coins: Coins) -> Verdict:
        children = children_of(draft)
        node = 0
        while children[node]:
            child, left = self.choose(draft, children[node], laws[node], coins)
            if child is None:
                return Verdict(tuple(draft.tree.path(node)), coins.draw(left))
            node = child
        return Verdict(tuple(draft.tree.path(node)), laws.draw(node, coins))

    def choose(
        self, draft: Draft, children: list[int], p: Tensor, coins: Coins
    ) -> tuple[int | None, Tensor]:
        """The accepted one of a node's children, or None and the law of the token instead."""
        tokens = draft.tree.tokens
        q = drawn_from(draft, children[0])
        for child in children:
            token = tokens[child]
            chance = float(q[token])
            if chance <= 0.0:  # nothing is known of the candidates that are left
                break
            if coins.flip(float(p[token]) / chance):
                return child, p
            rest = self.residual(p, q)
            if rest is None:
                break
            p = rest
            left = self.without(q, token) if draft.draw is Draw.DISTINCT else q
            if left is None:  # q ran out
                break
            q = left
        return None, p

    def residual(self, p: Tensor, q: Tensor) -> Tensor | None:
        """What the target still owes after a rejection; None where one has probability zero."""
        return residual(p, q)
