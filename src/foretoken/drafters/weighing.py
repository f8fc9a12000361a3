"""What drafters share that know the chance of each node they propose, and learn from outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foretoken.drafters.rows import RowDrafter
from foretoken.trees.select import prune
from foretoken.trees.worth import paying
from foretoken.types import Budget, DecodeState, Draft, Draw, KeepGoing, TokenTree, Verdict


class WeighingDrafter(RowDrafter):
    """Base of drafters of fixed candidates; override `weigh`."""

    trees = True
    valued = sparing = True

    def weigh(self, row: DecodeState, budget: Budget) -> tuple[TokenTree, list[float]]:
        """A tree within depth and nodes, and for each node the chance that its path is accepted.

        The root's is one, and no node's is above its parent's. Prices are nobody's concern here.
        """
        raise NotImplementedError

    def propose_one(self, row: DecodeState, budget: Budget, keep_going: KeepGoing) -> Draft:
        tree, values = self.weigh(row, budget)
        return Draft(affordable(tree, values, budget)[0], Draw.POINT)


def affordable(tree: TokenTree, values: Sequence[float], budget: Budget) -> tuple[TokenTree, float]:
    """The best nodes of a tree, and their worth in tokens above their price: as many as are
    allowed, and worth their price if there is one.
    """
    best = sorted(values[1:], reverse=True)[: budget.nodes]
    count, worth = paying(best, budget.node_prices)
    return tree if count == len(tree) - 1 else prune(tree, values, count)[0], worth


def emitted(tree: TokenTree, verdict: Verdict) -> list[int]:
    """The tokens a verdict on `tree` stands for."""
    return [*(tree.tokens[node] for node in verdict.path), verdict.next_token]


def trials(tree: TokenTree, said: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """Children of every node that the tokens `said` reach: node, depth, whether it was the one.

    The tree may be another one than was verified: what would have been accepted tells as much.
    """
    tokens, parents = tree.tokens, tree.parents
    reached = {0: 0}
    for node in range(1, len(tokens)):
        depth = reached.get(parents[node])
        if depth is not None and depth < len(said):
            hit = tokens[node] == said[depth]
            yield node, depth + 1, hit
            if hit:
                reached[node] = depth + 1
