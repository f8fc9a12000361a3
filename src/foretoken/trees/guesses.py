"""A row's tree of fixed candidates in plain memory, which operations in C read and write.

Behind a forward of the target code and data are cold, and an object of Python costs a microsecond:
what is looked up, merged and learned from in every step is kept as numbers side by side.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from foretoken.types import Draft, Draw, TokenTree

_INTS = ("tokens", "parents", "depths", "ranks", "marks")
_REALS = ("shares", "given", "paths")
ROOM = 32  # nodes at first
UNSAID = 0.5  # chance of a child, from a drafter that names none; experience corrects it


class _Tree(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_INTS, *_REALS)),
        ("count", ctypes.c_int64),
        ("score", ctypes.c_double),
    )


class Guesses:
    """A tree, and of each node its `marks` and `shares`, by which its drafter tells nodes apart and
    believes in them, its chance `given` its parent, and that of its whole path."""

    __slots__ = ("_ints", "_reals", "_room", "_state", "address")

    def __init__(self) -> None:
        self._room, self._state = 0, _Tree()
        self.address = ctypes.addressof(self._state)
        self.make_room(ROOM)
        self.clear(0)

    def __len__(self) -> int:
        return int(self._state.count)

    def make_room(self, nodes: int) -> None:
        """Memory for so many nodes below the root; what was there is lost where there was less."""
        if nodes < self._room:
            return
        room = self._room = max(nodes + 1, 2 * self._room)
        self._ints = array("q", bytes(8 * room * len(_INTS)))
        self._reals = array("d", bytes(8 * room * len(_REALS)))
        for names, numbers in ((_INTS, self._ints), (_REALS, self._reals)):
            first = numbers.buffer_info()[0]
            for at, name in enumerate(names):
                setattr(self._state, name, first + 8 * room * at)
        self._state.count = 0

    def clear(self, token: int) -> None:
        """The root alone."""
        self.fill(TokenTree((token,), (-1,)), (1.0,), shares=(1.0,), given=(1.0,))

    def fill(
        self,
        tree: TokenTree,
        paths: Sequence[float],
        marks: Sequence[int] = (),
        shares: Sequence[float] = (),
        given: Sequence[float] = (),
        score: float = 0.0,
    ) -> None:
        """Write all of it; what is not named is zero."""
        size = len(tree)
        self.make_room(size - 1)
        room, ints, reals = self._room, self._ints, self._reals
        empty = (0,) * size
        columns = (tree.tokens, tree.parents, tree.depths(), tree.ranks(), marks or empty)
        for at, whole in enumerate(columns):
            ints[at * room : at * room + size] = array("q", whole)
        for at, numbers in enumerate((shares or empty, given or empty, paths)):
            reals[at * room : at * room + size] = array("d", numbers)
        self._state.count, self._state.score = size, score

    def take(self, draft: Draft) -> None:
        """What a drafter drafted."""
        chances = draft.chances
        if chances is None:
            chances = tuple([UNSAID**depth for depth in draft.tree.depths()])
        self.fill(draft.tree, chances)

    def _column(self, at: int) -> list[int]:
        first = at * self._room
        return self._ints[first : first + len(self)].tolist()

    def _numbers(self, at: int) -> list[float]:
        first = at * self._room
        return self._reals[first : first + len(self)].tolist()

    @property
    def tree(self) -> TokenTree:
        return TokenTree(tuple(self._column(0)), tuple(self._column(1)))

    @property
    def depths(self) -> list[int]:
        return self._column(2)

    @property
    def ranks(self) -> list[int]:
        return self._column(3)

    @property
    def marks(self) -> list[int]:
        return self._column(4)

    @property
    def shares(self) -> list[float]:
        return self._numbers(0)

    @property
    def given(self) -> list[float]:
        return self._numbers(1)

    @given.setter
    def given(self, chances: Sequence[float]) -> None:
        self._reals[self._room : self._room + len(self)] = array("d", chances)

    @property
    def paths(self) -> list[float]:
        return self._numbers(2)

    @property
    def score(self) -> float:
        """Tokens that the tree promises, where its drafter compares several."""
        return float(self._state.score)

    def draft(self, origin: tuple[int, ...] | None = None) -> Draft:
        """All of it as a draft; `origin`: which nodes these were of another one."""
        return Draft(self.tree, Draw.POINT, chances=tuple(self.paths), origin=origin)
