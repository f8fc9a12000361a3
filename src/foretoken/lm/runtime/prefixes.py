"""Prefix reuse: keys and values of texts that were read, for texts that begin as they did.

A system prompt that every request repeats, or the next turn of a chat, is then not fed again. What
is kept are copies, the longest unused given up first, so that rows of the batch own their slots.
Each owner has its own: how much of a text is reused says what was asked before.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.lm.runtime.cache import SlotCache
from foretoken.lm.runtime.packing import Memory
from foretoken.types import DecodeState, Taps

LOG = logging.getLogger(__name__)
SHORTEST = 16  # tokens in common from which on a copy is cheaper than feeding them
Columns = list[tuple[Tensor, Tensor]]  # of each group of layers: [layers, heads, S, dim] twice
Beginning = tuple[str | int, ...]  # an owner, and the first tokens of a text of theirs


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A text that was cached, and what is kept of it."""

    tokens: np.ndarray  # [S] ids
    columns: Columns
    owner: str = ""  # whose texts alone may begin with it
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
        self.asked = limit  # bytes that were wanted, whatever memory allows of them
        self.limit = limit
        self.held = 0  # bytes
        self.reused = 0  # tokens that were not fed again, over all texts
        self._kept: OrderedDict[int, Prefix] = OrderedDict()  # the one used last comes last
        self._alike: dict[Beginning, dict[int, Prefix]] = {}  # the same texts, by how they begin
        self._named = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(
        self, tokens: Sequence[int], most: int, taps: Taps, owner: str = ""
    ) -> tuple[Prefix, int] | None:
        """The owner's text that shares most of the first `most` tokens, and how many; None: too
        few.
        """
        wanted = np.asarray(tokens[:most])
        best, shared = None, SHORTEST - 1
        alike = self._alike.get(beginning(owner, wanted), {})
        for name, prefix in alike.items():
            common = min(in_common(prefix.tokens, wanted), prefix.usable(taps))
            if common > shared:
                best, shared = name, common
        if best is None:
            return None
        self._kept.move_to_end(best)
        alike[best] = alike.pop(best)
        self.reused += shared
        return self._kept[best], shared

    def keep(self, prefix: Prefix) -> None:
        """Keep a text, if it may be; others make room for it."""
        if self.make_room(prefix, prefix.bytes):
            self._kept[self._named] = prefix
            alike = self._alike.setdefault(beginning(prefix.owner, prefix.tokens), {})
            alike[self._named] = prefix
            self._named += 1
            self.held += prefix.bytes

    def make_room(self, prefix: Prefix, size: int) -> bool:
        """Whether a text of so many bytes may be kept: then others that it continues are given up,
        and the longest unused, before it is copied."""
        if len(prefix.tokens) < SHORTEST or size > self.limit:
            return False
        alike = self._alike.get(beginning(prefix.owner, prefix.tokens), {})
        for name, other in tuple(alike.items()):
            common = in_common(other.tokens, prefix.tokens)
            if common == len(other.tokens) and other.usable(other.taps) <= prefix.usable(
                other.taps
            ):
                self._forget(name)
        while self.held + size > self.limit:
            self._forget(next(iter(self._kept)))
        return True

    def allow(self, limit: int) -> None:
        """Keep no more than so many bytes from now on."""
        self.limit = limit
        while self.held > limit:
            self._forget(next(iter(self._kept)))

    def covers(self, tokens: Sequence[int], owner: str = "") -> bool:
        """Whether a text that is kept of the owner begins with all of these tokens, which are not
        so few that they are fed anyway.
        """
        wanted = np.asarray(tokens)
        alike = tuple(self._alike.get(beginning(owner, wanted), {}).values())
        return any(in_common(one.tokens, wanted) == len(wanted) for one in alike)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(tuple(self._kept.values()))

    def clear(self) -> None:
        """Forget everything, as after a change of weights."""
        self._kept.clear()
        self._alike.clear()
        self.held = 0

    def _forget(self, name: int) -> None:
        prefix = self._kept.pop(name)
        begins = beginning(prefix.owner, prefix.tokens)
        alike = self._alike[begins]
        del alike[name]
        if not alike:
            del self._alike[begins]
        self.held -= prefix.bytes


def retire(
    row: DecodeState, memory: Memory, reused: int, cache: SlotCache, prefixes: Prefixes
) -> None:
    """Keep what is cached of a row that ended without a fault. Of several texts of one prompt the
    first alone is kept: others took all of their prompts over from it, `reused` tokens.
    """
    again = 0 < row.prompt_len - 1 <= reused
    if row.finish is not None and row.error is None and not again:
        keep_text(row, memory, cache, prefixes)


def keep_text(row: DecodeState, memory: Memory, cache: SlotCache, prefixes: Prefixes) -> None:
    """Keep a copy of what is cached of a row, which may go on.

    Whoever asks goes on where there is no memory for the copy: nothing is kept then.
    """
    tokens = row.tokens[: memory.cached]
    own = memory.supplied is not None or memory.stale or row.rehearsal
    own |= bool(memory.taps) and not memory.fed  # of no use to who reads hidden states
    if own or len(tokens) < SHORTEST or prefixes.covers(tokens, row.owner):
        return
    size = memory.cached * column_size(cache)
    if size > prefixes.limit:
        return
    try:
        text = Prefix(np.asarray(tokens), [], row.owner, memory.taps, sizes(memory))
        if prefixes.make_room(text, text.bytes + size):
            columns = cache.copied(memory.slot, memory.cached)
            if columns is not None:
                features = torch.cat(memory.fed)[: memory.cached] if memory.fed else None
                prefixes.keep(replace(text, columns=columns, features=features))
    except (RuntimeError, MemoryError) as error:
        prefixes.clear()
        LOG.warning("nothing is kept of texts that are over: %s", error)


def column_size(cache: SlotCache) -> int:
    """Bytes of a token's keys and values in all layers."""
    parts = [part for group in cache.groups for part in (group.keys, group.values)]
    return sum(part[:, :1, :, :1].nbytes for part in parts)


def sizes(memory: Memory) -> Float[Tensor, "F L H"] | None:
    """What stands for a row's hidden states while room is asked for: a tensor without numbers."""
    if not memory.fed:
        return None
    known = min(sum(map(len, memory.fed)), memory.cached)
    return memory.fed[0].new_empty((known, *memory.fed[0].shape[1:]), device="meta")


def beginning(owner: str, tokens: np.ndarray) -> Beginning:
    """By what texts are told apart at once: it is the same where they share enough tokens."""
    return owner, *tokens[:SHORTEST].tolist()


def in_common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts share from their beginning on."""
    length = min(len(one), len(other))
    if length == 0 or one[0] != other[0]:
        return 0
    differ = one[:length] != other[:length]
    first = int(differ.argmax())
    return first if differ[first] else length
