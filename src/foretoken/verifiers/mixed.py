"""The greedy multi-draft rule, from the top down (Hu et al., arXiv 2502.18779; SpecHub for two).

The ordinary rule for one candidate is applied to the sampled child x alone, with the law qt it came
from; whatever token comes out, the walk goes on in the child that carries it. Since qt is zero on
the fixed children, the residual norm(relu(p - qt)) gives them all of p: the chance to go on is
p(fixed) + sum of min(p, qt) elsewhere, the best any rule can do with such candidates. Trying the
fixed children first and x by what is left would lose some of it.
"""

from __future__ import annotations

from foretoken.coins import Coins
from foretoken.trees.mixed import sampled_and_fixed
from foretoken.types import Draft, Draw, Laws, Verdict
from foretoken.verifiers.point import ForDrawn, descend, drawn_from
from foretoken.warp.residual import residual


class Mixed(ForDrawn):
    """Keep or correct the sampled child, then descend by value."""

    exact_for = frozenset({Draw.POINT, Draw.MIXED})

    def judge(self, draft: Draft, laws: Laws, coins: Coins) -> Verdict:
        children = draft.tree.children()

        def said(node: int) -> int:
            return self.next_token(draft, node, children[node], laws, coins)

        return descend(draft, said)

    def next_token(
        self, draft: Draft, node: int, children: list[int], laws: Laws, coins: Coins
    ) -> int:
        """A token from p: the sampled child's if its coin says so, else the correction."""
        child = None
        if children:
            q = drawn_from(draft, children[0])
            child, _ = sampled_and_fixed(draft.tree.tokens, children, q)
        if child is None:
            return laws.draw(node, coins)
        token, p = draft.tree.tokens[child], laws[node]
        if coins.flip(float(p[token]) / float(q[token])):
            return token
        rest = residual(p, q)
        return coins.draw(p if rest is None else rest)
