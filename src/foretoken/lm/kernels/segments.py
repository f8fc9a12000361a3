"""Stretches of a captured forward that run as one call in C (`c/segment.c`).

Between the products of a layer lie a dozen small operations. For few tokens they cost more to call
than to compute, and every product wakes its threads anew; a segment with products and attention
inside wakes them once. For many tokens each reads and writes all of them; a segment between
products takes some tokens through all of its steps while they are in the processor's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from foretoken.lm.kernels.lowering import KIND, Form, LookUp, Lowering, Step
from foretoken.lm.runtime.slot_attention import IN_ONE_CALL, SlotAttention
from foretoken.native import scratch
from foretoken.native.library import Call, Places, by_token, together

AT_LEAST = 16  # tokens that memory is made for: trees of a few sizes share it


class _Place(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("buffer", "offset", "apart"))


class _Step(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("places", _Place * 3),
        ("to", _Place),
        ("what", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("counted", ctypes.c_int64),
        ("input", ctypes.c_int64),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("apart", ctypes.c_int64))


class Arena:
    """Memory for what the steps of a segment leave to each other, and the addresses of all."""

    __slots__ = ("address", "bases", "memory", "tokens")

    def __init__(self, of: Stretch, tokens: int) -> None:
        sizes, self.tokens = of.sizes, tokens
        self.memory = [None if n is None else torch.empty(n * tokens, dtype=of.dtype)
                       for n in sizes]  # fmt: skip
        self.bases = (of.entry * len(of.slots))()
        for i, slot in enumerate(of.slots):
            memory = self.memory[slot]
            if memory is not None:
                self.bases[i] = of.entry(memory.data_ptr())
        self.address = ctypes.addressof(self.bases)


class Stretch:
    """Steps bound to the weights as they lie now."""

    entry: type[ctypes.c_void_p | _Buffer]  # of the table of buffers

    def __init__(
        self,
        made: Lowering,
        results: Sequence[fx.Node],
        weights: Mapping[Any, Tensor],
        flat: Collection[fx.Node],  # results without a dimension of rows
        call: Call,
    ) -> None:
        self.dtype, self.call, self.forms = made.dtype, call, made.forms
        self.given = made.inputs
        self.results: list[tuple[int, Form, bool]] = []
        steps = sorted(made.steps, key=lambda step: step.kind != KIND["look up"])  # these go first
        taken = {given.buffer for given in self.given}
        for node in results:
            form = made.form(node)
            assert form is not None
            to = made.read(node)
            if to.buffer in taken or (to.offset, to.apart) != (0, form.count):
                to = made.room(form.count)
                steps.append(
                    Step(KIND["copy"], form.count, (made.read(node),), to, counted=form.counted)
                )
            taken.add(to.buffer)
            self.results.append((to.buffer, form, node in flat))
        self.slots, self.sizes = shared_memory(steps, made.buffers, taken)
        self.steps = steps
        self.table = in_a_row([bound(step, weights) for step in steps])
        self.kept = [weights.get(step.what, step.what) for step in steps]  # what they point into
        for at, step in enumerate(steps):
            if isinstance(step.what, LookUp):
                self.read_table(at, step.what.table())
        self.address, self.count = ctypes.addressof(self.table), len(steps)
        self.idle: list[Arena] = []

    def read_table(self, at: int, table: Tensor) -> None:
        """Have a step look up in these rows."""
        self.kept.append(table)  # another thread may be reading the one before
        self.table[at].what, width = table.data_ptr(), self.steps[at].width
        self.table[at].count = table.numel() // width

    def give_back(self, arena: Arena) -> None:
        """Keep it for the next call, unless a prompt wanted it."""
        if arena.tokens <= IN_ONE_CALL:
            self.idle.append(arena)

    def arena(self, tokens: int) -> Arena:
        """Memory for so many tokens that nobody uses."""
        whole = -(-tokens // AT_LEAST) * AT_LEAST
        try:
            found = self.idle.pop()
        except IndexError:  # the first call, or another thread is inside
            return Arena(self, whole)
        return found if found.tokens >= tokens else Arena(self, whole)


class Segment(Stretch):
    """One stretch with products and attention, for few tokens."""

    entry = ctypes.c_void_p

    def __call__(
        self, attend: SlotAttention, ids: Tensor, positions: Tensor, places: Tensor, *given: Tensor
    ) -> list[Tensor]:
        """The results [1, Q, ...] of tokens [1, Q], or [1, P, ...] at some places, or [P, ...] of
        those that are flat, for inputs [1, Q, ...]; `attend` knows the cache."""
        inputs = ids.contiguous(), positions.contiguous(), places.contiguous()
        counts = ids.shape[1], places.shape[0]
        arena = self.arena(max(counts))
        bases, held = arena.bases, [states.contiguous() for states in given]
        for one, states in zip(self.given, held, strict=True):
            bases[one.buffer] = states.data_ptr()
        made = []
        for buffer, form, flat in self.results:
            size = (counts[form.counted], *form.shape)
            result = torch.empty(size if flat else (1, *size), dtype=self.dtype, device="cpu")
            bases[buffer] = result.data_ptr()
            made.append(result.movedim(1, 1 + form.axis) if form.axis else result)
        asked = (
            self.address, self.count, arena.address, *counts, *map(Tensor.data_ptr, inputs),
            attend.owner.layers_of(self), attend.address, attend.count, attend.threads,
        )  # fmt: skip
        while (short := self.call(*asked)) >= 0:
            self.lengthen(short, inputs)
        self.give_back(arena)
        return made

    def lengthen(self, at: int, inputs: Sequence[Tensor]) -> None:
        """Grow the table of a step that was asked for rows beyond it; IndexError if it cannot."""
        look_up = self.steps[at].what
        wanted = inputs[look_up.input]
        if look_up.grow is None or int(wanted.min()) < 0:
            raise IndexError(f"{wanted.tolist()} are not all below {self.table[at].count}")
        look_up.grow(int(wanted.max()) + 1)
        self.read_table(at, look_up.table())


class Between(Stretch):
    """One stretch between products and attention, for many tokens."""

    entry = _Buffer

    def __call__(self, attend: SlotAttention, *given: Tensor) -> list[Tensor]:
        """The results [1, Q, ...] for inputs [1, Q, ...], each token by itself."""
        tokens = given[0].shape[self.given[0].axis]
        arena = self.arena(together() * attend.threads)
        bases, held = arena.bases, []
        for one, states in zip(self.given, given, strict=True):
            laid, apart = by_token(states, one.axis, one.count)
            bases[one.buffer] = _Buffer(laid.data_ptr(), apart)
            held.append(laid)
        made = []
        for buffer, form, _ in self.results:
            result = scratch.empty((1, tokens, *form.shape), self.dtype)
            bases[buffer] = _Buffer(result.data_ptr(), form.count)
            made.append(result.movedim(1, 1 + form.axis) if form.axis else result)
        self.call(self.address, self.count, arena.address, tokens, attend.threads)
        self.give_back(arena)
        return made


def bound(step: Step, weights: Mapping[Any, Tensor]) -> _Step:
    """A step with the addresses of its weights."""
    to = _Place(step.to.buffer, step.to.offset, step.to.apart)
    places = [_Place(place.buffer, place.offset, place.apart) for place in step.places]
    filling = places[0] if places else to  # for what a step does not read
    three = (_Place * 3)(*places, *[filling] * (3 - len(places)))
    what, count, given = None, step.count, 0
    if isinstance(step.what, Places):
        what, count = step.what.address, step.what.count
    elif isinstance(step.what, LookUp):
        given = step.what.input
    elif step.what is not None:
        what = weights[step.what].data_ptr()
    return _Step(step.kind, step.width, three, to, what, count, step.real, step.counted, given)


def in_a_row(steps: Sequence[_Step]) -> ctypes.Array[_Step]:
    """As C reads them."""
    return (_Step * len(steps))(*steps)


def shared_memory(
    steps: Sequence[Step], buffers: Sequence[int], outside: Collection[int]
) -> tuple[list[int], list[int | None]]:
    """A slot for every buffer, and the size of every slot; buffers that are never alive together
    share one, so that all of them stay in the processor's cache. None: from or for outside."""
    last = {place.buffer: i for i, step in enumerate(steps) for place in step.places}
    slots, sizes = [0] * len(buffers), list[int | None]()
    free: dict[int, list[int]] = {}
    for buffer in outside:
        slots[buffer] = len(sizes)
        sizes.append(None)
    for i, step in enumerate(steps):
        buffer = step.to.buffer
        if buffer not in outside:
            size = buffers[buffer]
            if not free.get(size):
                free[size] = [len(sizes)]
                sizes.append(size)
            slots[buffer] = free[size].pop()
        for done in {place.buffer for place in step.places} | {buffer}:
            if done not in outside and last.get(done, i) == i:
                free.setdefault(buffers[done], []).append(slots[done])
    return slots, sizes
