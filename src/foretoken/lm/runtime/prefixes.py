"""Prefix reuse: keys and values of texts that are over, for texts that begin as they did.

A system prompt that every request repeats, or the next turn of a chat, is then not fed again. What
is kept are copies, the longest unused given up first, so that rows of the batch own their slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from foretoken.types import Taps

SHORTEST = 16  # tokens in common from which on a copy is cheaper than feeding them
Columns = list[tuple[Tensor, Tensor]]  # of each group of layers: [layers, heads, S, dim] twice


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A text that was cached, and what is kept of it."""

    tokens: np.ndarray  # [S] ids
    columns: Columns
    taps: Taps = ()  # whose hidden states are kept beside
    features: Float[Tensor, "F L H"] | None = None  # of its first F tokens

    @property
    def bytes(self) -> int:
        held = [part for pair in self.columns for part in pair]
        held += [] if self.features is None else [self.features]
        return sum(part.nbytes for part in held) + self.tokens.nbytes

    def usable(self, taps: Taps) -> int:
        """Tokens that a text may take from it, where the features of these are wanted."""
        if not taps:
            return len(self.tokens)
        return 0 if self.features is None or self.taps != taps else len(self.features)


class Prefixes:
    """What one model keeps of earlier texts, up to so many bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0  # bytes
        self.reused = 0  # tokens that were not fed again, over all texts
        self._kept: OrderedDict[int, Prefix] = OrderedDict()  # the one used last comes last
        self._named = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, tokens: Sequence[int], most: int, taps: Taps) -> tuple[Prefix, int] | None:
        """The text that shares most of the first `most` tokens, and how many; None: too few."""
        wanted = np.asarray(tokens[:most])
        best, shared = None, SHORTEST - 1
        for name, prefix in self._kept.items():
            common = min(in_common(prefix.tokens, wanted), prefix.usable(taps))
            if common > shared:
                best, shared = name, common
        if best is None:
            return None
        self._kept.move_to_end(best)
        self.reused += shared
        return self._kept[best], shared

    def keep(self, prefix: Prefix) -> None:
        """Keep a text; others that it continues are given up, and then the longest unused."""
        length, size = len(prefix.tokens), prefix.bytes
        if length < SHORTEST or size > self.limit:
            return
        for name, other in tuple(self._kept.items()):
            common = in_common(other.tokens, prefix.tokens)
            if common == len(other.tokens) and other.usable(other.taps) <= prefix.usable(
                other.taps
            ):
                self._forget(name)
        self._kept[self._named] = prefix
        self._named += 1
        self.held += size
        self.allow(self.limit)

    def allow(self, limit: int) -> None:
        """Keep no more than so many bytes from now on."""
        self.limit = limit
        while self.held > limit:
            self._forget(next(iter(self._kept)))

    def covers(self, tokens: Sequence[int]) -> bool:
        """Whether a text that is kept begins with all of these tokens."""
        wanted = np.asarray(tokens)
        return any(in_common(one.tokens, wanted) == len(wanted) for one in self)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(tuple(self._kept.values()))

    def clear(self) -> None:
        """Forget everything, as after a change of weights."""
        self._kept.clear()
        self.held = 0

    def _forget(self, name: int) -> None:
        self.held -= self._kept.pop(name).bytes


def in_common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts share from their beginning on."""
    length = min(len(one), len(other))
    if length == 0 or one[0] != other[0]:
        return 0
    differ = one[:length] != other[:length]
    first = int(differ.argmax())
    return first if differ[first] else length
