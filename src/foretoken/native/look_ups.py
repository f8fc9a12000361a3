"""Look-ups in one call in C each (`c/copies.c`, `c/guesses.c`), and the tables that these use.

Every call says whether it was made: without a compiler the drafters do the same in Python. None
lets go of the interpreter: they take microseconds, and what they learn is shared by all rows.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import Any

from foretoken.native.library import plain
from foretoken.trees import token_odds
from foretoken.trees.guesses import Guesses
from foretoken.trees.token_odds import TextOdds, TokenOdds
from foretoken.trees.worth import Calibration
from foretoken.types import Prices


class _Table(ctypes.Structure):
    """Numbers for C, and the arrays that it points to."""

    def __init__(self, **numbers: Any) -> None:
        super().__init__()
        self.kept = numbers
        for name, value in numbers.items():
            setattr(self, name, value.buffer_info()[0] if isinstance(value, array) else value)
        self.address = ctypes.addressof(self)


class OddsTable(_Table):
    """`ClassOdds`, texts that are greedy behind the others."""

    _fields_ = (
        *((name, c_void_p) for name in ("hits", "promised", "factors", "prior", "places")),
        *((name, c_int64) for name in ("count", "longest")),
        *((name, c_double) for name in ("weight", "fade", "floor")),
    )


class IndexTable(_Table):
    """Where a `SuffixIndex` lies, and the newest places behind one and two tokens."""

    _fields_ = (
        ("text", c_void_p),
        ("count", c_int64),
        *((name, c_void_p) for name in ("by_one", "by_two")),
        *((name, c_int64) for name in ("base", "after_one", "after_two")),
    )

    def aim(self, text: array[int], links: Sequence[array[int]], base: int) -> None:
        """Arrays that grow lie somewhere else from time to time."""
        self.text, self.count = text.buffer_info()
        self.by_one, self.by_two = links[0].buffer_info()[0], links[1].buffer_info()[0]
        self.base = base


class FollowingTable(_Table):
    """What a speculation from suffixes is to be like."""

    _fields_ = (
        *((name, c_int64) for name in ("longest", "most", "max_spec", "branching", "lengths")),
        *((name, c_double) for name in ("factor", "offset", "min_prob")),
    )


class AdjacencyTable(_Table):
    """Where an `Adjacency` lies."""

    _fields_ = (("ids", c_void_p), ("sure", c_void_p), ("keep", c_int64))


class _Calibration(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("hits", "promised", "edges")),
        ("edge_count", c_int64),
        *((name, c_double) for name in ("weight", "fade")),
    )


class Calibrations:
    """Tables of several `Calibration`s, side by side."""

    def __init__(self, known: Sequence[Calibration]) -> None:
        edges = array("d", Calibration.EDGES)
        self.kept = edges, tuple(known)
        self.table = (_Calibration * len(known))()
        for one, place in zip(known, self.table, strict=True):
            place.hits, place.promised = one.hits.buffer_info()[0], one.promised.buffer_info()[0]
            place.edges, place.edge_count = edges.buffer_info()
            place.weight, place.fade = one.weight, one.FADE
        self.address = ctypes.addressof(self.table)


class TokenTable(_Table):
    """`TokenOdds` and the rates at which they move."""

    _fields_ = (
        ("numbers", c_void_p),
        ("kinds", c_int64),
        *((name, c_double) for name in ("likely", "least", "most")),
        *((name, c_double) for name in ("token_rate", "before_rate", "text_rate", "most_squares")),
    )

    def __init__(self, known: TokenOdds) -> None:
        super().__init__(
            numbers=known.numbers, kinds=token_odds.KINDS, likely=token_odds.LIKELY,
            least=token_odds.LEAST, most=token_odds.MOST, token_rate=token_odds.TOKEN_RATE,
            before_rate=token_odds.BEFORE_RATE, text_rate=token_odds.TEXT_RATE,
            most_squares=token_odds.MOST_SQUARES,
        )  # fmt: skip


def copied(
    found: Guesses, text: array[int], size: int, starts: Sequence[int], depth: int, nodes: int,
    least: float, odds: OddsTable, greedy: bool, ends: array[int],
) -> bool:  # fmt: skip
    """What stands in the first `size` tokens of `text` from `starts` on, as a tree."""
    call = plain("copied")
    if call is None:
        return False
    places = array("q", starts)
    found.make_room(min(nodes, len(places) * depth))
    call(
        found.address, text.buffer_info()[0], size, *places.buffer_info(), depth, nodes, least,
        odds.address, greedy, *ends.buffer_info(),
    )  # fmt: skip
    return True


def guesses_tried(found: Guesses, said: array[int], odds: OddsTable, greedy: bool) -> bool:
    """What was looked up is compared with the tokens that came."""
    call = plain("guesses_tried")
    if call is None:
        return False
    call(found.address, *said.buffer_info(), odds.address, greedy)
    return True


def followed(
    found: Guesses, spare: Guesses, index: IndexTable, text: array[int], size: int,
    how: FollowingTable, unfinished: int, depth: int, nodes: int, least: float | None,
    odds: OddsTable, greedy: bool, ends: array[int],
) -> bool:  # fmt: skip
    """What followed the last of `size` tokens where `index` has them, as a tree."""
    call = plain("followed")
    if call is None:
        return False
    first, count = text.buffer_info()[0], min(size, how.longest)
    for tree in (found, spare):
        tree.make_room(min(how.max_spec, nodes))
    call(
        found.address, spare.address, index.address, first + 8 * (size - count), count, how.address,
        unfinished, depth, nodes, -1.0 if least is None else least, odds.address, greedy,
        *ends.buffer_info(),
    )  # fmt: skip
    return True


def recycled(
    found: Guesses, known: AdjacencyTable, root: int, odds: OddsTable, least: float, depth: int,
    nodes: int, greedy: bool, ends: array[int],
) -> bool:  # fmt: skip
    """The likeliest followers of followers of `root`."""
    call = plain("recycled")
    if call is None:
        return False
    found.make_room(nodes)
    call(
        found.address, known.address, root, odds.address, least, depth, nodes, greedy,
        *ends.buffer_info(),
    )  # fmt: skip
    return True


def merged(
    found: Guesses, offers: Sequence[Guesses], levels: Calibrations, agreed: Calibrations,
    tokens: TokenTable, greedy: bool, text: TextOdds,
) -> bool:  # fmt: skip
    """All offers as one tree, with what its nodes are worth."""
    call = plain("merged")
    if call is None:
        return False
    found.make_room(sum([len(offer) - 1 for offer in offers]))
    places = array("q", [offer.address for offer in offers])
    deep = len(levels.table) // len(offers)
    call(
        found.address, *places.buffer_info(), levels.address, deep, agreed.address, tokens.address,
        greedy, text.numbers.buffer_info()[0],
    )  # fmt: skip
    return True


def merged_tried(
    found: Guesses, offers: Sequence[Guesses], levels: Calibrations, agreed: Calibrations,
    tokens: TokenTable, greedy: bool, text: TextOdds, said: array[int],
) -> bool:  # fmt: skip
    """All offers, and what became of them, are compared with the tokens that came."""
    call = plain("merged_tried")
    if call is None:
        return False
    places = array("q", [offer.address for offer in offers])
    deep = len(levels.table) // len(offers)
    call(
        found.address, *places.buffer_info(), levels.address, deep, agreed.address, tokens.address,
        greedy, text.numbers.buffer_info()[0], *said.buffer_info(),
    )  # fmt: skip
    return True


def paid(found: Guesses, cut: Guesses, nodes: int, prices: Prices | None) -> array[int] | None:
    """The likeliest nodes, as many as are allowed and worth their price, the root first; what they
    are as a tree is in `cut` unless they are all. None where this cannot be had in C."""
    call = plain("paid")
    if call is None:
        return None
    cut.make_room(len(found))
    kept = array("q", bytes(8 * len(found)))
    asked = (None, 0) if prices is None else prices.table.buffer_info()
    count = call(found.address, cut.address, nodes, *asked, kept.buffer_info()[0])
    return kept[:count]
