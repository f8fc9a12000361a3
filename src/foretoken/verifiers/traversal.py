"""Traversal verification of sampled trees, leaves first (Weng et al., arXiv 2505.12398).

Where the recursive rule asks at each node whether one more token may stay, this one asks at a leaf
whether the whole path may, and only on failure tries the next leaf, then what is above. `owed` is
the part of the target's law that must still end somewhere at or below a node; a child that failed
leaves norm(relu(owed p - q)) behind. On a chain it is block verification. Fixed candidates gain
nothing by it and are walked.

Mixed children (one sampled, the others fixed) are judged by a law each: the sampled one first, by
the law it came from, each fixed one by the law that always gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from foretoken.coins import Coins
from foretoken.trees.mixed import sampled_and_fixed
from foretoken.types import Draft, Draw, Laws, Scores, Verdict
from foretoken.verifiers.block import all_at_once, law_drawn_from, repaired, share, sure
from foretoken.verifiers.point import walk
from foretoken.verifiers.recursive import fixed, without

CHAINS = frozenset({Draw.IID, Draw.DISTINCT})  # with one child each, both are a draw from q


class Traversal:
    """Accept the first path, deepest first, whose joint law can be repaired."""

    exact_for = frozenset({Draw.POINT, Draw.IID, Draw.DISTINCT, Draw.MIXED})
    chains_only = False

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        pass

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def verify(self, draft: Draft, scores: Scores, coins: Coins) -> Verdict:
        laws = scores.p
        assert laws is not None, "the loop sets the laws before a verdict is asked"
        if len(draft.tree) == 1 or laws.greedy or draft.draw is Draw.POINT:
            return walk(draft, scores, coins)
        if draft.tree.is_chain and draft.draw in CHAINS:
            node, law = all_at_once(draft, laws, coins)  # in a chain, node i is i tokens deep
        else:
            node, law = self.settle(draft, laws, coins)
        return Verdict(tuple(draft.tree.path(node)), coins.draw(law))

    def settle(self, draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
        """The last node that stays, and the law of the token after it; any tree, chains too."""
        children = draft.tree.children()

        def visit(node: int, owed: float) -> tuple[int, Tensor] | None:
            if owed <= 0.0:
                return None
            p = laws[node]
            for child, q in self.proposals(draft, node, children[node], p):
                token = draft.tree.tokens[child]
                chance = float(q[token])
                if chance <= 0.0:  # q ran out: nothing is known of the candidates that are left
                    break
                kept = min(1.0, owed * float(p[token]) / chance)
                found = visit(child, 1.0 if kept >= sure(p) else kept)
                if found is not None:
                    return found
                rest = self.residual(p, q, owed)
                mass = float(rest.sum())
                owed, p = share(mass, owed), repaired(rest, mass, p)
                if owed <= 0.0:
                    return None
            return (node, p) if node == 0 or coins.flip(owed) else None

        found = visit(0, 1.0)
        assert found is not None, "what the root is owed stays one"
        return found

    def proposals(
        self, draft: Draft, node: int, children: list[int], p: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """The children of `node` in the order they are tried, each with the law it came from."""
        if not children:
            return
        tokens, q = draft.tree.tokens, law_drawn_from(draft, node)
        if draft.draw is Draw.MIXED:
            drawn, rest = sampled_and_fixed(tokens, children, q)
            if drawn is not None:
                yield drawn, q
            yield from ((child, fixed(tokens[child], p)) for child in rest)
            return
        for child in children:
            yield child, q
            if draft.draw is Draw.DISTINCT:
                q = self.without(q, tokens[child])

    def residual(self, p: Tensor, q: Tensor, owed: float) -> Tensor:
        """What a failed child leaves of the target's law, not yet normalised."""
        return (owed * p - q).clamp_(min=0.0)

    def without(self, q: Tensor, token: int) -> Tensor:
        """q of the next draw without replacement."""
        return without(q, token)
