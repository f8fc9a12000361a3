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
