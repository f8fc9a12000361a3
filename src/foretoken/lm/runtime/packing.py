"""What one row contributes to a forward, and what a row's cache holds."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.lm.runtime.sharing import Shared
from foretoken.trees.masks import ancestors, depths, prefixes
from foretoken.types import Taps


@dataclass(slots=True, eq=False)
class Memory:
    """One row in the cache: committed columns, then the nodes of its open tree in feeding order."""

    slot: int
    cached: int = 0  # committed tokens that have columns
    tokens: list[int] = field(default_factory=list)  # of the open tree
    depths: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)  # ancestors as bits
    far: bool = False  # longrope: columns were made beyond the switch
    # [n H], what stands for the embeddings of the tokens fed next; None: the model's own
    supplied: Float[Tensor, "n H"] | None = None
    # hidden states of its first tokens as they were fed, where prefixes are kept, and their taps
    fed: list[Float[Tensor, "S L H"]] = field(default_factory=list)
    taps: Taps = ()
    weights: Shared | None = None  # whoever counts how often those that it is read by were changed
    made: int = field(init=False, default=0)  # how often they had been before its first column

    def __post_init__(self) -> None:
        self.made = 0 if self.weights is None else self.weights.changes

    @property
    def stale(self) -> bool:
        """Whether weights were changed since its first columns were made."""
        return self.weights is not None and self.weights.changes != self.made

    def take(self, count: int) -> Float[Tensor, "n H"] | None:
        """What stands for the embeddings of `count` tokens that are about to be fed."""
        if self.supplied is None:
            return None
        assert len(self.supplied) >= count, "tokens are fed that nothing was supplied for"
        taken, left = self.supplied[:count], self.supplied[count:]
        self.supplied = left if len(left) else left.clone()  # which does not keep what was taken
        return taken

    def listen(self, states: Float[Tensor, "S L H"], taps: Taps, limit: int, column: int) -> None:
        """Add hidden states of tokens just fed, where their text may be kept in `limit` bytes, of
        which the keys and values of each token take `column`.
        """
        self.taps = taps
        size = self.cached * column + sum(part.nbytes for part in self.fed) + states.nbytes
        begun = sum(map(len, self.fed)) + len(states) == self.cached
        if limit and size <= limit and begun:
            self.fed.append(states)
        else:  # it is too long to be kept, or might not be when its first tokens were fed
            self.fed.clear()

    def forget(self) -> None:
        """Drop the open tree."""
        self.tokens, self.depths, self.seen = [], [], []

    def prune(self, nodes: Sequence[int], settled: int) -> None:
        """Keep `nodes` of the open tree; the first `settled` ones are committed."""
        kept = nodes[settled:]
        places = {node: i for i, node in enumerate(kept)}
        seen: list[int] = []
        for i, node in enumerate(kept):
            parent = (self.seen[node] ^ 1 << node).bit_length() - 1  # the last of its ancestors
            seen.append(1 << i | (seen[places[parent]] if parent in places else 0))
        self.cached += settled
        self.tokens = [self.tokens[node] for node in kept]
        self.depths = [self.depths[node] - settled for node in kept]
        self.seen = seen


@dataclass(slots=True, eq=False)
class Feed:
    """Tokens of one row for one forward. Column `base + j` is bit j of `seen`."""

    memory: Memory
    base: int  # columns before this are seen by all, as far as windows allow
    start: int  # column of the first token
    tokens: list[int]
    positions: list[int]
    seen: list[int]
    key_positions: list[int]  # of the columns from `base` on
    scored: int  # logits are wanted for that many last tokens
    # what the memory becomes once the forward is done
    cached: int
    nodes: tuple[list[int], list[int], list[int]] | None = None  # tokens, depths, seen
    whole: bool = False  # tapped features are wanted of all tokens, not of the scored ones alone
    embedded: Float[Tensor, "q H"] | None = None  # in place of the tokens' own embeddings

    @property
    def tapped(self) -> int:
        """The first token whose features are wanted."""
        return len(self.tokens) - self.scored if self.scored and not self.whole else 0

    @property
    def stop(self) -> int:
        """Columns of this row after the forward."""
        return self.start + len(self.tokens)

    @property
    def in_order(self) -> bool:
        """Whether every token sees all columns up to its own: a chain."""
        return self.in_order_behind(0)

    @property
    def unseen(self) -> int:
        """First columns of its row that none of its tokens sees: pads."""
        if self.base or self.seen[0] & 1:
            return 0
        seen = reduce(or_, self.seen)
        return (seen & -seen).bit_length() - 1

    def in_order_behind(self, unseen: int) -> bool:
        """The same, so many of the row's first columns aside."""
        most, none = 1 << self.start - self.base, (1 << unseen) - 1
        for bits in self.seen:
            most <<= 1
            if bits != most - 1 - none:
                return False
        return True

    def settle(self) -> None:
        """Record what the forward has cached."""
        self.memory.cached = self.cached
        if self.nodes is not None:
            tokens, down, seen = self.nodes
            self.memory.tokens += tokens
            self.memory.depths += down
            self.memory.seen += seen


@dataclass(slots=True, eq=False)
class Batch:
    """One forward: its rows by ascending slot, shorter ones padded by their last token."""

    feeds: list[Feed]
    width: int  # tokens per row
    longest: int  # columns read
    kept: int  # logits are computed for that many last places
    ids: Int[Tensor, "B Q"]
    positions: Int[Tensor, "B Q"]
    embedded: Float[Tensor, "B Q H"] | None = None

    @property
    def places(self) -> Int[Tensor, "n"]:
        """Where logits are computed. Told their number, Gemma 4 runs its last layers for those
        places alone; told the places, it gives hidden states of all tokens as other models do.

        They lie on the CPU, which can index states on any device: layers may be on several.
        """
        return torch.arange(self.width - self.kept, self.width)

    def key_positions(self) -> Int[Tensor, "B K"]:
        """Logical position of every cache column."""
        device = self.ids.device
        columns = torch.arange(self.longest, device=device).repeat(len(self.feeds), 1)
        for row, feed in zip(columns, self.feeds, strict=True):
            row[feed.base : feed.stop] = torch.tensor(feed.key_positions, device=device)
        return columns


class Numbers:
    """Ids and positions of a lone row, in memory that all its forwards on a CPU share: a tensor of
    a few numbers costs more to make than to read."""

    MOST = 64

    def __init__(self, device: torch.device) -> None:
        self.device, self.most = device, self.MOST if device.type == "cpu" else 0
        self.memory = (ctypes.c_int64 * (2 * self.MOST))()
        self.whole = torch.frombuffer(self.memory, dtype=torch.long).view(2, 1, self.MOST)
        self.views: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, ids: list[int], positions: list[int]) -> tuple[Int[Tensor, "1 Q"], ...]:
        """Both as tensors, to be read before the next ones are asked for."""
        width = len(ids)
        if width > self.most:
            return torch.tensor([[ids], [positions]], device=self.device).unbind()
        if width not in self.views:
            self.views[width] = self.whole[0, :, :width], self.whole[1, :, :width]
        self.memory[:width] = ids  # type: ignore[assignment]
        self.memory[self.MOST : self.MOST + width] = positions  # type: ignore[assignment]
        return self.views[width]


def committed_feed(memory: Memory, tokens: Sequence[int], stop: int) -> Feed:
    """Committed tokens up to `stop`, as a chain behind what is cached."""
    start = memory.cached
    positions = list(range(start, stop))
    return Feed(
        memory,
        base=start,
        start=start,
        tokens=list(tokens[start:stop]),
        positions=positions,
        seen=prefixes(stop - start),
        key_positions=positions,
        scored=0,
        cached=stop,
        embedded=memory.take(stop - start),
    )


def tree_feed(
    memory: Memory, missing: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> Feed:
    """New nodes of the open tree, behind committed tokens that are `missing` in the cache."""
    known = len(memory.tokens)
    down = depths(parents, memory.depths)
    seen = ancestors(parents, memory.seen)
    base, late = memory.cached, len(missing)
    root = base + late
    positions = [root + depth for depth in down]
    embedded = memory.take(late + len(tokens))
    if not late:
        keys = [root + depth for depth in memory.depths] + positions if known else positions
        return Feed(
            memory, base, base + known, list(tokens), positions, seen, keys,
            len(tokens), base, (list(tokens), down, seen), embedded=embedded,
        )  # fmt: skip
    assert not known, "committed tokens are caught up with before a tree is opened"
    before = (1 << late) - 1
    positions = [*range(base, root), *positions]
    return Feed(
        memory,
        base=base,
        start=base,
        tokens=[*missing, *tokens],
        positions=positions,
        seen=prefixes(late) + [before | bits << late for bits in seen],
        key_positions=positions,
        scored=len(tokens),
        cached=root,
        nodes=(list(tokens), down, seen),
        embedded=embedded,
    )


def beginning(feeds: Sequence[Feed]) -> Feed:
    """The first token of a feed that has any, as if it were all of a row, which remembers nothing.

    Attention in C knows the buffers of a cache that was written to before: with a token of their
    own the first text of a session rounds as all later ones do.
    """
    feed = max(feeds, key=lambda feed: len(feed.tokens))
    embedded = None if feed.embedded is None else feed.embedded[:1]
    first = feed.tokens[:1]
    memory = Memory(feed.memory.slot)
    return Feed(memory, 0, 0, first, [0], [1], [0], scored=0, cached=1, embedded=embedded)


def padded(numbers: list[int], width: int) -> list[int]:
    """As many numbers, the last one repeated."""
    missing = width - len(numbers)
    return numbers + numbers[-1:] * missing if missing else numbers


def repeated(rows: Float[Tensor, "q H"], width: int) -> Float[Tensor, "width H"]:
    """As many rows, the last one repeated."""
    missing = width - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, -1)]) if missing else rows


def renewed_feed(
    memory: Memory,
    committed: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int],
    far: bool,
    switch: int,
) -> Feed:
    """The whole row and its tree once more, with all positions scaled for one side of `switch`.

    On the near side, nodes beyond the switch are fed at its edge: their columns are of no use, and
    are made again before anyone reads them.
    """
    down = depths(parents, memory.depths)
    seen = ancestors(parents, memory.seen)
    late = len(committed)
    every = memory.depths + down
    positions = [*range(late), *(late + depth for depth in every)]
    if not far:
        positions = [min(position, switch - 1) for position in positions]
    before = (1 << late) - 1
    return Feed(
        memory,
        base=0,
        start=0,
        tokens=[*committed, *memory.tokens, *tokens],
        positions=positions,
        seen=prefixes(late) + [before | bits << late for bits in memory.seen + seen],
        key_positions=positions,
        scored=len(tokens),
        cached=late,
        nodes=(list(tokens), down, seen),
    )
