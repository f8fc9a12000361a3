"""Shapes of trees that grow level by level: how many children, and what a budget leaves of them.

A shape is cut before anything is drawn, from past steps alone: nodes taken away after their draw
would change the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul


def level_sizes(widths: Sequence[int]) -> list[int]:
    """Nodes of each level where every node of a level has `widths[level]` children."""
    return list(accumulate(widths, mul))


def nodes_below_root(widths: Sequence[int]) -> int:
    """All of them together."""
    return sum(level_sizes(widths))


@lru_cache(maxsize=4096)
def cut_branching(widths: tuple[int, ...], depth: int, nodes: int) -> tuple[int, ...]:
    """`widths` narrowed to at most `depth` levels and `nodes` nodes.

    The widest level loses one child per node until the tree fits, the deepest of equals first;
    a chain that is still too long loses its end.
    """
    kept = list(widths[: max(depth, 0)])
    while kept and nodes_below_root(kept) > nodes:
        widest = max(kept)
        if widest == 1:
            kept.pop()
        else:
            kept[len(kept) - 1 - kept[::-1].index(widest)] -= 1
    return tuple(kept)


@lru_cache(maxsize=4096)
def cut_beam(width: int, depth: int, nodes: int) -> tuple[int, ...]:
    """Nodes per level of a beam of `width`: the same everywhere, what is left over at the top."""
    levels = max(min(depth, nodes), 0)
    if not levels:
        return ()
    share, over = divmod(nodes, levels)
    return tuple(min(width, share + (level < over)) for level in range(levels))
