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

import torch
from torch import Tensor

from foretoken.coins import Coins
from foretoken.trees.mixed import sampled_and_fixed
from foretoken.types import Draft, Draw, Laws, Verdict
from foretoken.verifiers.block import all_at_once, repaired, share, sure
from foretoken.verifiers.point import ForDrawn, children_of, drawn_from

CHAINS = frozenset({Draw.IID, Draw.DISTINCT})  # with one child each, both are a draw from q


class Traversal(ForDrawn):
    """Accept the first path, deepest first, whose joint law can be repaired."""

    exact_for = frozenset({Draw.POINT, Draw.IID, Draw.DISTINCT, Draw.MIXED})

    def judge(self, draft: Draft, laws: Laws, coins: Coins) -> Verdict:
        if draft.tree.is_chain and draft.draw in CHAINS:
            node, law = all_at_once(draft, laws, coins)  # in a chain, node i is i tokens deep
        else:
            node, law = self.settle(draft, laws, coins)
        return Verdict(tuple(draft.tree.path(node)), coins.draw(law))

    def settle(self, draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
        """The last node that stays, and the law of the token after it.

        On a processor the printed rule is the quicker one: it stops where a path is accepted. On a
        device each of its coins would be a wait.
        """
        if laws[0].device.type == "cpu":
            return self.one_by_one(draft, laws, coins)
        return level_by_level(draft, laws, coins)

    def one_by_one(self, draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
        """The rule as it is printed, a node at a time and no more of them than needed."""
        children = children_of(draft)

        def visit(node: int, owed: float) -> tuple[int, Tensor] | None:
            if owed <= 0.0:
                return None
            p = laws[node]
            for child, q in self.proposals(draft, children[node], p):
                token = draft.tree.tokens[child]
                chance = float(q[token])
                if chance <= 0.0:  # q ran out: nothing is known of the candidates that are left
                    break
                ratio = owed * float(p[token]) / chance
                if ratio != ratio:  # p is NaN: a text that ends here is refused by drawing from it
                    break
                kept = min(1.0, ratio)
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
        self, draft: Draft, children: list[int], p: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """A node's children in the order they are tried, each with the law it came from."""
        if not children:
            return
        tokens, q = draft.tree.tokens, drawn_from(draft, children[0])
        if draft.draw is Draw.MIXED:
            drawn, rest = sampled_and_fixed(tokens, children, q)
            if drawn is not None:
                yield drawn, q
            yield from ((child, fixed(tokens[child], p)) for child in rest)
            return
        for child in children:
            yield child, q
            left = self.without(q, tokens[child]) if draft.draw is Draw.DISTINCT else q
            if left is None:  # q ran out: nothing is known of the candidates that are left
                return
            q = left

    def residual(self, p: Tensor, q: Tensor, owed: float) -> Tensor:
        """What a failed child leaves of the target's law, not yet normalised."""
        return (owed * p - q).clamp_(min=0.0)


def fixed(token: int, like: Tensor) -> Tensor:
    """The law of a candidate that was not drawn at all."""
    q = torch.zeros_like(like)
    q[token] = 1.0
    return q


def level_by_level(draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
    """The rule for any tree, a level at a time: two reads from the device, whatever its size.

    A node is asked only after everything before it has failed, so what it is owed then follows
    from the tree alone, and all coins can be weighed before the first is flipped.
    """
    order = tried(draft)
    level, owed = [0], laws[0].new_ones(1)
    nodes, shares = [], []  # of all levels
    left: dict[int, Tensor] = {}  # [V] after each node's children have failed
    while level:
        above = [i for i, node in enumerate(level) if order[node]]
        below: list[int] = []
        kept = [owed[:0]]
        if above:
            first = [order[level[i]][0] for i in above]
            family = _Families(draft, laws, [level[i] for i in above], first, owed[above])
            for turn in range(max(len(order[level[i]]) for i in above)):
                rows = [r for r, i in enumerate(above) if turn < len(order[level[i]])]
                children = [order[level[above[r]]][turn] for r in rows]
                kept.append(family.fail(rows, children))
                below += children
            owed = owed.index_copy(0, torch.tensor(above, device=owed.device), family.owed)
            left.update({level[i]: law for i, law in zip(above, family.p, strict=True)})
        nodes += level
        shares.append(owed)
        level, owed = below, torch.cat(kept)
    chances = dict(zip(nodes, torch.cat(shares).tolist(), strict=True))
    node = next((node for node in bottom_up(order) if coins.flip(chances[node])), 0)
    return node, left[node] if node in left else laws[node]


class _Families:
    """Nodes of one level and what they are owed while their children fail in turn."""

    def __init__(
        self, draft: Draft, laws: Laws, nodes: list[int], first: list[int], owed: Tensor
    ) -> None:
        self.draft, self.owed = draft, owed  # [n]
        self.p = torch.stack([laws[node] for node in nodes])  # [n, V]
        self.q = torch.stack([drawn_from(draft, child) for child in first])  # [n, V]
        self.open = torch.ones_like(owed, dtype=torch.bool)  # q has not run out

    def fail(self, rows: list[int], children: list[int]) -> Tensor:
        """What each of `children` is owed, one for each of `rows`; then they count as failed."""
        at = torch.tensor(rows, device=self.p.device)
        picks = torch.tensor(
            [[self.draft.tree.tokens[child]] for child in children], device=self.p.device
        )
        p, q, owed = self.p[at], self.q[at], self.owed[at]
        guess = q.gather(1, picks)
        if self.draft.draw is Draw.MIXED:  # the others are fixed: their law gives nothing else
            q = torch.where(guess > 0.0, q, torch.zeros_like(q).scatter_(1, picks, 1.0))
            guess = q.gather(1, picks)
        kept = (owed[:, None] * p.gather(1, picks) / guess.clamp_min(1e-30))[:, 0].clamp(max=1.0)
        # a law of NaN accepts nothing
        known = self.open[at] & (guess[:, 0] > 0.0) & (kept >= 0.0)
        kept = torch.where(kept >= sure(p), torch.ones_like(kept), kept)
        rest = torch.addcmul(-q, p, owed[:, None]).clamp_(min=0.0)
        mass = rest.sum(-1)
        share = torch.where(owed >= 1.0, torch.ones_like(owed), mass / (mass + 1.0 - owed))
        self.owed = self.owed.index_copy(0, at, torch.where(known, share, owed))
        sound = (known & (mass > 0.0))[:, None]
        self.p = self.p.index_copy(0, at, torch.where(sound, rest / mass[:, None], p))
        self.open = self.open.index_copy(0, at, known)
        if self.draft.draw is Draw.DISTINCT:
            others = q.scatter(1, picks, 0.0)
            others = others / others.sum(-1, keepdim=True).clamp_min(1e-30)
            self.q = self.q.index_copy(0, at, others)
        return torch.where(known, kept, torch.zeros_like(kept))


def tried(draft: Draft) -> list[list[int]]:
    """The children of each node in the order they are tried: as drawn, of mixed the drawn first."""
    children = children_of(draft)
    if draft.draw is not Draw.MIXED:
        return children
    families = [family for family in children if family]
    tokens = draft.tree.tokens
    chances = torch.cat([drawn_from(draft, f[0])[[tokens[c] for c in f]] for f in families])
    known = dict(zip((c for f in families for c in f), chances.tolist(), strict=True))
    return [sorted(family, key=lambda child: known[child] <= 0.0) for family in children]


def bottom_up(order: list[list[int]]) -> Iterator[int]:
    """All nodes but the root, each after everything below it and before its later siblings."""

    def below(node: int) -> Iterator[int]:
        for child in order[node]:
            yield from below(child)
            yield child

    return below(0)
