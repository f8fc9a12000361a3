"""Suffix arrays by prefix doubling (Manber and Myers 1993), to a bounded depth.

A look-up compares a few dozen tokens, so suffixes need to be in order of their first few dozen
tokens only: three or four sorts of integers, whatever the text repeats. Suffixes that agree so far
stay in order of their position, so equal texts give equal arrays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def sort_suffixes(tokens: npt.NDArray[np.integer], depth: int) -> npt.NDArray[np.uint32]:
    """Start positions of all suffixes, in order of at least their first `depth` tokens.

    The end of the text comes before every token, as in a comparison of byte strings.
    """
    size = len(tokens)
    assert size < 1 << 31, "a segment is shorter than that"
    if size == 0:
        return np.empty(0, np.uint32)
    keys, width = _packed(tokens, depth)
    place = np.argsort(keys, kind="stable")
    while width < depth:
        ranks, distinct = _ranks(keys, place)
        if distinct == size:
            break
        keys = ranks * (size + 1)
        keys[: size - width] += ranks[width:] + 1  # 0 where nothing follows
        place = np.argsort(keys, kind="stable")
        width *= 2
    return place.astype(np.uint32)


def _packed(tokens: npt.NDArray[np.integer], depth: int) -> tuple[npt.NDArray[np.int64], int]:
    """As many first tokens of every suffix as fit into 63 bits, and how many those are."""
    size = len(tokens)
    first = tokens.astype(np.int64) + 1
    bits = int(first.max()).bit_length()
    width = min(depth, 63 // bits)
    keys = np.zeros(size, np.int64)
    for k in range(width):
        keys <<= bits
        keys[: max(size - k, 0)] |= first[k:]
    return keys, width


def _ranks(
    keys: npt.NDArray[np.int64], place: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.int64], int]:
    """For every suffix the number of smaller keys that differ, and how many keys there are."""
    ordered = keys[place]
    counted = np.zeros(len(keys), np.int64)
    np.cumsum(ordered[1:] != ordered[:-1], out=counted[1:])
    ranks = np.empty_like(counted)
    ranks[place] = counted
    return ranks, int(counted[-1]) + 1
