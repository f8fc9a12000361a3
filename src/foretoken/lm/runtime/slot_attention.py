"""Attention of new tokens over the slot cache, in C (`foretoken.native`).

One call per layer writes the new keys and values and reads every row's own columns, however long
its neighbours are; nothing is padded, and no view of the cache is made.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.lm.runtime.attention import attend
from foretoken.lm.runtime.cache import SlotCache
from foretoken.native import scratch
from foretoken.native.library import Library, library

TRIED = (1, 8, 32, 128, 512)  # tokens of a row for which both ways are timed
PROMPT = 128  # from so many tokens on: a prompt, alone in its columns
IN_ONE_CALL = 64  # tokens of a forward that may be one call in C, if its attention is in C
SPARED = 1e-4  # seconds that this spares in each layer at the least (0.2 to 0.6 ms were measured)
COLUMNS, ROUNDS = 512, 25
LOOKS = 4  # at a loss, before it is believed
FEWER = 5  # rounds of a prompt, which takes long enough to be told apart; a load waits for them
ENDLESS = 1 << 30

_SIZES = (
    "heads", "groups", "width", "value_width",
    "q_head", "q_token", "k_head", "k_token", "v_head", "v_token",
    "key_slot", "key_head", "value_slot", "value_head",
)  # fmt: skip


class _Layout(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in _SIZES)


class _Cached(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("of", ctypes.c_void_p),
    )


class Asks(Protocol):
    """A stretch of a forward with attention of some layers."""

    @property
    def forms(self) -> Mapping[int, tuple[int, ...]]:
        """Layer -> heads, then elements between heads and tokens of queries, keys and values."""
        ...

    def __hash__(self) -> int: ...


class Reading(NamedTuple):
    """One row of a forward: which of its tokens, the columns they fill, and all that are read.

    C reads it as so many integers (`struct row`).
    """

    slot: int
    first: int  # of its tokens among those of the batch
    last: int  # the one behind them
    start: int  # column of the first; all columns are counted from behind those skipped
    stop: int  # columns read
    behind: int  # columns that all its tokens see: the mask begins behind them
    mask: int = 0  # address of [tokens, stop - behind], zero where a column is seen; 0: no tree
    mask_token: int = 0  # elements between its rows
    skip: int = 0  # columns in front that none of them sees

    @classmethod
    def of(
        cls, slot: int, first: int, last: int, start: int, mask: Tensor | None, skip: int = 0
    ) -> Reading:
        """`mask` is that of the last columns, all before being seen by all tokens; columns to
        `skip`, and of the mask none of those, by none."""
        start -= skip
        stop = start + last - first
        if mask is None:
            return cls(slot, first, last, start, stop, stop, skip=skip)
        behind, step = stop - mask.shape[-1], mask.stride(-2)
        return cls(slot, first, last, start, stop, behind, mask.data_ptr(), step, skip)


class SlotAttention:
    """`attend` of a captured model for one forward; `kept` are the masks that its rows point to.

    What is made of a token depends on the tokens that it sees and on nothing else, neither on who
    is beside it nor on the columns of other branches (matrix units aside, whose sums of a tree are
    made in the order of its columns).
    """

    __slots__ = ("address", "count", "kept", "owner", "table", "threads")

    def __init__(self, owner: InSlots, rows: Sequence[Reading], kept: Sequence[Tensor]) -> None:
        self.owner, self.kept = owner, kept
        self.table = array("q", chain.from_iterable(rows))
        self.address, self.count = self.table.buffer_info()[0], len(rows)
        self.threads = torch.get_num_threads()

    def __call__(
        self,
        layer: int,
        query: Tensor,  # [1, H, Q, D], the tokens of all rows one behind another
        key: Tensor,  # [1, KV, Q, D]
        value: Tensor,
        scaling: float | None,
        *_: Any,  # soft caps and sinks: models that have them are not read this way
    ) -> Tensor:
        """[1, Q, H, D of values]."""
        owner = self.owner
        keys, values, of = owner.layers[layer]
        if (
            not query.stride(3) == key.stride(3) == value.stride(3) == 1
        ):  # as some products leave it
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        shape, wide = query.shape, value.shape[3]
        made = scratch.empty((1, shape[2], shape[1], wide), query.dtype)
        strides = (states.stride()[1:3] for states in (query, key, value))
        form = (shape[1], *(step for pair in strides for step in pair))
        owner.call(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), made.data_ptr(), keys, values,
            ctypes.addressof(owner.layout(of, form)), self.address, self.count,
            shape[3] ** -0.5 if scaling is None else scaling, self.threads,
        )  # fmt: skip
        return made


class InSlots:
    """Makes attention in C over one slot cache, where that can be had and is faster."""

    def __init__(self, slots: SlotCache, fold: int, most: int | None = None) -> None:
        self.slots, self.fold = slots, fold
        self.most = most  # tokens of a row, 0: never; None: as many as it is the faster one for
        self.known: int | None = None  # which buffers the addresses below are of
        self.call: Callable[..., None]
        self.reach = 0
        self.layers: list[tuple[int, int, tuple[int, ...]]] = []  # addresses, sizes and steps
        self.layouts: dict[Any, _Layout] = {}
        self.tables: WeakKeyDictionary[Asks, Any] = WeakKeyDictionary()  # askers hold weights

    def waits(self) -> bool:
        """Whether nothing is missing but buffers, which are made like what layers put in first."""
        return self.most != 0 and not self.slots.groups and isinstance(library(), Library)

    def always(self) -> None:
        """From now on for any number of tokens, whatever was measured."""
        if self.most != ENDLESS:
            self.most, self.known = ENDLESS, None

    def over(self, rows: Sequence[Reading], kept: Sequence[Tensor] = ()) -> SlotAttention | None:
        """For these rows; None where torch's attention is to be asked."""
        tokens = max(row.last - row.first for row in rows)
        return SlotAttention(self, rows, kept) if self.takes(tokens) else None

    def takes(self, tokens: int) -> bool:
        """Whether rows that bring at most so many tokens can be had."""
        if not self.slots.in_place:
            return False
        if self.known != self.slots.made:
            self.read_buffers()
        return tokens <= self.reach

    def read_buffers(self) -> None:
        """Addresses and steps of every layer's buffers, and how many tokens a row may bring."""
        slots = self.slots
        self.known, self.reach, self.layouts = slots.made, 0, {}
        self.tables.clear()
        first = slots.groups[0].keys
        widths = [
            buffer.shape[4] for group in slots.groups for buffer in (group.keys, group.values)
        ]
        call = in_c(first.dtype, *widths)
        if call is None or not all(group.keys.is_cpu for group in slots.groups):
            return
        layers: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for group in slots.groups:
            for layer, keys, values in zip(group.layers, group.keys, group.values, strict=True):
                heads, width, wide = keys.shape[1], keys.shape[3], values.shape[3]
                steps = (*keys.stride()[:2], *values.stride()[:2])
                layers[id(layer)] = keys.data_ptr(), values.data_ptr(), (heads, width, wide, *steps)
        self.call = call
        self.layers = [layers[id(layer)] for layer in slots.rows_of]
        groups, width, wide = self.layers[0][2][:3]
        form = groups, self.fold, width, wide
        self.reach = (
            reach(first.dtype, *form, torch.get_num_threads()) if self.most is None else self.most
        )

    def layers_of(self, asker: Asks) -> int:
        """Address of a table of all layers, for somebody who asks for attention of several."""
        if asker not in self.tables:
            table = (_Cached * len(self.layers))()
            kept = []
            for layer, form in asker.forms.items():
                keys, values, of = self.layers[layer]
                kept.append(self.layout(of, form))
                table[layer] = _Cached(keys, values, ctypes.addressof(kept[-1]))
            self.tables[asker] = table, kept
        return ctypes.addressof(self.tables[asker][0])

    def layout(self, of: tuple[int, ...], form: tuple[int, ...]) -> _Layout:
        """The sizes and steps of one layer's states and buffers.

        `form`: heads, then elements between heads and between tokens of queries, keys and values.
        """
        key = of, form
        if key not in self.layouts:
            if len(self.layouts) > 1024:
                self.layouts = {}
            heads, *inner = form
            groups, width, wide, *steps = of
            self.layouts[key] = _Layout(heads, groups, width, wide, *inner, *steps)
        return self.layouts[key]


def in_c(dtype: torch.dtype, *widths: int) -> Callable[..., None] | None:
    """Attention in C for heads of these widths; None where it cannot be had."""
    found = library()
    if not isinstance(found, Library) or any(width % found.inputs for width in widths):
        return None
    return found.calls.get(("attend", dtype))


@cache
def reach(
    dtype: torch.dtype, groups: int, fold: int, width: int, value_width: int, threads: int
) -> int:
    """The most tokens of a row for which attention in C is the faster one on this machine.

    A loss is believed when it was seen several times: a neighbour's busy moment would last for the
    life of the process.
    """
    slots = SlotCache(1, 1, COLUMNS)
    keys, values = (torch.zeros(1, groups, 1, n, dtype=dtype) for n in (width, value_width))
    slots.update(keys, values, 0)
    slots.reserve([0], [COLUMNS])
    own, best = InSlots(slots, fold, max(TRIED)), 0
    for tokens in TRIED:
        if not any(pays(own, tokens) for _ in range(LOOKS)):
            return best
        best = tokens
    return ENDLESS


def pays(own: InSlots, tokens: int) -> bool:
    """Whether our attention was the faster one for a row just now, or spares more than it costs."""
    ours, theirs = timed(own, tokens)
    return ours <= theirs + (SPARED if tokens <= IN_ONE_CALL else 0.0)


def timed(own: InSlots, tokens: int) -> tuple[float, float]:
    """Seconds of our attention and torch's for a row, in turns; the best of some rounds."""
    prompt = tokens >= PROMPT
    start = 0 if prompt else COLUMNS - tokens
    [group] = own.slots.groups
    heads, width, wide = group.keys.shape[2], group.keys.shape[4], group.values.shape[4]
    like = group.keys
    query = like.new_zeros(1, heads * own.fold, tokens, width)
    key, value = like.new_zeros(1, heads, tokens, width), like.new_zeros(1, heads, tokens, wide)
    mask = like.new_zeros(1, 1, own.fold * tokens, COLUMNS)
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    new, least = mask[0, 0, :, start : start + tokens], torch.finfo(like.dtype).min
    new.masked_fill_(hidden.repeat(own.fold, 1), least)
    plain = prompt or tokens == 1
    block = mask[0, 0, :, start:]  # of the new columns alone
    ours = own.over([Reading.of(0, 0, tokens, start, None if plain else block)], [mask])
    assert ours is not None
    stop, best = start + tokens, [float("inf"), float("inf")]
    for _ in range(FEWER if prompt else ROUNDS):
        began = perf_counter()
        ours(0, query, key, value, None)
        between = perf_counter()
        group.keys[0, :, :, start:stop] = key
        group.values[0, :, :, start:stop] = value
        keys, values = group.keys[0, :, :, :stop], group.values[0, :, :, :stop]
        attend(None, query, keys, values, mask, unmasked=tokens == 1, causal=prompt)
        ended = perf_counter()
        best = [min(best[0], between - began), min(best[1], ended - between)]
    return best[0], best[1]
