"""Which nodes a tree should have. Pure functions over values of paths, no models.

The value of a node is the chance that its whole path is accepted, so it never grows along a path
and the n largest values always form a tree (Sequoia arXiv 2402.12374, OPT-Tree arXiv 2406.17276).
Whatever is chosen by value after it was drawn must be verified as POINT: only fixed candidates
may be re-ranked without changing the law.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.types import TokenTree


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree without tokens: each node is some rank among its parent's children."""

    parents: tuple[int, ...]  # parents[0] == -1 and parents[i] < i
    ranks: tuple[int, ...]  # 0 is the likeliest child; the root's is -1
    values: tuple[float, ...]  # chance that the path is accepted; the root's is 1

    @property
    def expected(self) -> float:
        """Expected tokens per step: the accepted nodes, and the one the verdict adds."""
        return math.fsum(self.values)


def best_nodes(values: Sequence[float], parents: Sequence[int], budget: int) -> list[int]:
    """The root and the `budget` most valuable other nodes, in node order; always a tree.

    Equal values go to the node created first, so a run can be repeated.
    """
    assert all(values[i] <= values[p] for i, p in enumerate(parents) if p >= 0), (
        "a path is never likelier than its beginning"
    )
    below = sorted(range(1, len(values)), key=lambda i: (-values[i], i))
    return sorted([0, *below[:budget]])


def prune(tree: TokenTree, values: Sequence[float], budget: int) -> tuple[TokenTree, list[int]]:
    """`tree` cut to its `budget` best nodes below the root, and which nodes those were."""
    kept = best_nodes(values, tree.parents, budget)
    place = {node: i for i, node in enumerate(kept)}
    tokens = tuple(tree.tokens[node] for node in kept)
    parents = tuple(place.get(tree.parents[node], -1) for node in kept)
    return TokenTree(tokens, parents), kept


def expected_accepted(values: Sequence[float]) -> float:
    """Expected accepted tokens of a tree, from the values of its nodes (root first)."""
    return math.fsum(values[1:])


def best_first_shape(rates: Sequence[float], nodes: int, depth: int) -> Shape:
    """The best static shape of `nodes` nodes below the root, at most `depth` deep, by a heap.

    `rates[b]` is the chance that the b-th child of a reached node is the accepted one; they are
    sorted here, since a heap needs the better sibling first. A node's next sibling and first child
    enter when it leaves, so every node is pushed once: O(n log n).
    """
    rates = sorted((r for r in rates if r > 0.0), reverse=True)
    parents, ranks, values, depths = [-1], [-1], [1.0], [0]
    heap: list[tuple[float, int, int, int]] = []  # (-value, order of creation, parent, rank)
    pushed = 0

    def push(parent: int, rank: int) -> None:
        nonlocal pushed
        if rank < len(rates) and depths[parent] < depth:
            heapq.heappush(heap, (-values[parent] * rates[rank], pushed, parent, rank))
            pushed += 1

    push(0, 0)
    while heap and len(parents) <= nodes:
        value, _, parent, rank = heapq.heappop(heap)
        parents.append(parent)
        ranks.append(rank)
        values.append(-value)
        depths.append(depths[parent] + 1)
        push(parent, rank + 1)
        push(len(parents) - 1, 0)
    return Shape(tuple(parents), tuple(ranks), tuple(values))


def optimal_expected(rates: Sequence[float], nodes: int, depth: int) -> float:
    """Expected tokens per step of the best static shape, by dynamic programming.

    Sequoia's recurrence: T[m][l][b] is the best value of a subtree of m nodes (its root counted),
    at most l deep, whose root has at most b children; the b-th child takes m - y of the nodes.
    The reference for `best_first_shape`, which finds the same value faster.
    """
    rates = sorted((r for r in rates if r > 0.0), reverse=True)
    width, size = len(rates), nodes + 1
    best = [1.0 if m == 1 else -math.inf for m in range(size + 1)]  # depth 0, any width
    for _ in range(depth):
        table = [[1.0 if m == 1 else -math.inf for m in range(size + 1)]]  # no children
        for b in range(width):
            fewer = table[-1]
            row = list(fewer)
            for m in range(2, size + 1):
                for y in range(1, m):
                    row[m] = max(row[m], fewer[y] + rates[b] * best[m - y])
            table.append(row)
        best = table[-1]
    return max(best[1:])


def best_size(values: Sequence[float], seconds: Sequence[float]) -> int:
    """How many nodes give the most tokens per second; 0 is plain decoding.

    `values` are those of the nodes in the order they would be added, `seconds[n]` is the cost of a
    step with n of them. A plain scan: measured costs have steps, so the rate has several peaks.
    """
    best, best_rate, tokens = 0, 1.0 / seconds[0], 1.0
    for n in range(1, min(len(values) + 1, len(seconds))):
        tokens += values[n - 1]
        if tokens / seconds[n] > best_rate:
            best, best_rate = n, tokens / seconds[n]
    return best
