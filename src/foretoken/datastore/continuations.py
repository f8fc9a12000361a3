"""What followed a text elsewhere, and the tree of its most frequent beginnings (REST,
arXiv 2311.08252, section 3.2).

A beginning is counted once for every continuation that has it, so no node counts more than its
parent and the n most frequent ones are a tree, with ties going to the shorter beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Continuations:
    """Tokens that followed, one row per occurrence, and how many occurrences a row stands for."""

    length: int  # tokens of the context that were found
    paths: npt.NDArray[np.int64]  # [rows, depth], rows in order
    weights: npt.NDArray[np.float64]  # [rows]
    total: float  # occurrences, those left out by `starting_with` included

    def starting_with(self, tokens: npt.ArrayLike) -> Continuations:
        """Those whose first token is one of `tokens`."""
        kept = np.isin(self.paths[:, 0], tokens)
        return Continuations(self.length, self.paths[kept], self.weights[kept], self.total)


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Nodes of a trie, parents before children; the root is not among them."""

    tokens: list[int]
    parents: list[int]  # -1: the root
    weights: list[float]  # occurrences that begin like this


def in_order(
    paths: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The rows of several ordered arrays in one order."""
    order = np.lexsort(paths.T[::-1])
    return paths[order], weights[order]


def beginnings(
    found: Continuations, nodes: int, end: int, stops: frozenset[int] = frozenset()
) -> Beginnings:
    """The `nodes` most frequent beginnings of ordered rows.

    Ids from `end` on are no tokens: nothing of a row counts from there on. A token of `stops`
    counts, and nothing behind it does.
    """
    paths, weights = found.paths, found.weights
    rows, depth = paths.shape
    if nodes <= 0 or rows == 0 or depth == 0:
        return Beginnings([], [], [])
    fresh = np.ones((rows, depth), bool)  # a row's beginning is not the one above it
    np.logical_or.accumulate(paths[1:] != paths[:-1], axis=1, out=fresh[1:])
    column, row = np.nonzero(fresh.T)  # candidates by depth, then in order
    # A beginning lasts until the next one of its length, or to the last row.
    until = np.append(row[1:], rows)
    until[until == 0] = rows
    totals = np.append(0.0, np.cumsum(weights))
    counts = totals[until] - totals[row]
    number = np.cumsum(fresh.T).reshape(depth, rows) - 1
    parents = np.where(column > 0, number[column - 1, row], -1)
    counts[_ended(paths, end, stops)[row, column]] = 0.0
    best = np.argsort(-counts, kind="stable")[:nodes]  # by depth where counts are equal
    kept = np.sort(best[counts[best] > 0.0])
    place = np.full(len(counts) + 1, -1)  # the last entry is the root's
    place[kept] = np.arange(len(kept))
    return Beginnings(
        paths[row[kept], column[kept]].tolist(),
        place[parents[kept]].tolist(),
        counts[kept].tolist(),
    )


def _ended(paths: npt.NDArray[np.int64], end: int, stops: frozenset[int]) -> npt.NDArray[np.bool_]:
    """Where a row holds nothing to guess."""
    ended = paths >= end
    for stop in stops:
        ended[:, 1:] |= paths[:, :-1] == stop
    return np.logical_or.accumulate(ended, axis=1)
