"""Stretches of a captured forward that run as one call in C (`c/segment.c`), for few tokens.

Between the products of a layer lie a dozen small operations. One at a time they cost more to call
than to compute, and every product wakes its threads anew; a segment wakes them once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from foretoken.lm.kernels.linears import NATIVE
from foretoken.lm.kernels.lowering import KIND, Form, Lowering, Step
from foretoken.lm.kernels.measuring import MOST
from foretoken.lm.kernels.native import Call, Places, operation
from foretoken.lm.kernels.position_tables import PositionTable, by_position
from foretoken.lm.kernels.rewrites import A, value
from foretoken.lm.kernels.straight_line import ATTEND, EXTRA, Program, Writer
from foretoken.lm.runtime.slot_attention import SlotAttention

TOKENS = MOST[NATIVE]  # of a call, at most: no reach is longer (`choosing.reach_in_c`)


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
    )


class Arena:
    """Memory for what the steps of a segment leave to each other, and the addresses of all."""

    __slots__ = ("address", "bases", "memory")

    def __init__(
        self, sizes: Sequence[int | None], slots: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.memory = [None if n is None else torch.empty(n * TOKENS, dtype=dtype) for n in sizes]
        self.bases = (ctypes.c_void_p * len(slots))()
        for i, slot in enumerate(slots):
            memory = self.memory[slot]
            self.bases[i] = None if memory is None else memory.data_ptr()
        self.address = ctypes.addressof(self.bases)


class Segment:
    """One stretch, bound to the weights as they lie now."""

    def __init__(
        self, made: Lowering, results: Sequence[fx.Node], weights: Mapping[Any, Tensor], call: Call
    ) -> None:
        self.dtype, self.call, self.forms = made.dtype, call, made.forms
        self.given = [buffer for _, buffer in made.inputs]
        self.width = made.buffers[self.given[0]]
        self.results: list[tuple[int, Form]] = []
        steps = [*made.steps]
        for node in results:
            form = made.form(node)
            assert form is not None
            to = made.room(form.count)
            steps.append(Step(KIND["copy"], form.count, (made.read(node),), to))
            self.results.append((to.buffer, form))
        outside = {*self.given, *(buffer for buffer, _ in self.results)}
        self.slots, self.sizes = shared_memory(steps, made.buffers, outside)
        self.table = (_Step * len(steps))(*(bound(step, weights) for step in steps))
        self.kept = [weights.get(step.what, step.what) for step in steps]  # what they point into
        self.address, self.count = ctypes.addressof(self.table), len(steps)
        self.idle: list[Arena] = []

    def __call__(self, attend: SlotAttention, *given: Tensor) -> list[Tensor]:
        """The results [1, Q, ...] for inputs [1, Q, ...]; `attend` knows the cache."""
        tokens = given[0].numel() // self.width
        try:
            arena = self.idle.pop()
        except IndexError:  # the first call, or another thread is inside
            arena = Arena(self.sizes, self.slots, self.dtype)
        bases, held = arena.bases, [states.contiguous() for states in given]
        for buffer, states in zip(self.given, held, strict=True):
            bases[buffer] = states.data_ptr()
        made = []
        for buffer, form in self.results:
            result = torch.empty((1, tokens, *form.shape), dtype=self.dtype)
            bases[buffer] = result.data_ptr()
            made.append(result.movedim(1, 1 + form.axis) if form.axis else result)
        self.call(
            self.address, self.count, arena.address, tokens,
            attend.owner.layers_of(self), attend.address, attend.count, attend.threads,
        )  # fmt: skip
        self.idle.append(arena)
        return made


def bound(step: Step, weights: Mapping[Any, Tensor]) -> _Step:
    """A step with the addresses of its weights."""
    places = [_Place(place.buffer, place.offset, place.apart) for place in step.places]
    places += [places[0]] * (3 - len(places))
    what, count = None, step.count
    if isinstance(step.what, Places):
        what, count = step.what.address, step.what.count
    elif step.what is not None:
        what = weights[step.what].data_ptr()
    to = _Place(step.to.buffer, step.to.offset, step.to.apart)
    return _Step(step.kind, step.width, (_Place * 3)(*places), to, what, count, step.real)


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


class FewTokens:
    """Writes the variant of a captured forward for few tokens of one batch laid end to end."""

    def __init__(
        self,
        program: Program,
        results: Sequence[fx.Node],
        instead: Mapping[fx.Node, fx.Node | str],
        call: Call,
    ) -> None:
        self.program, self.call = program, call
        self.writer = Writer(program, instead)
        needed = self.writer.needed(results)
        self.order = [node for node in program.capture.graph.nodes if node in needed]
        self.readers: dict[Any, list[Any]] = {self.writer.place(node): [None] for node in results}
        for node in self.order:
            for given in self.writer.inputs(node):
                self.readers.setdefault(given, []).append(node)
        self.lines: list[str] = []
        self.parts: list[Any] = []  # what the lines call
        self.look_up()
        self.write()
        self.lines.append(f"return [{', '.join(self.writer.said(node) for node in results)}]")

    def look_up(self) -> None:
        """Read from tables what depends on positions alone."""
        known, read = by_position(self.program, self.order)
        table = PositionTable.of(self.program, read) if read else None
        if table is not None:
            kept = [node for node in known if node.target is A.sym_size.int]
            self.order = [node for node in self.order if node not in known or node in kept]
            self.emit(read, table, [self.program.label[self.program.capture.inputs[1]]])

    def write(self) -> None:
        """Operations in their order; one that is no step, and waits for none, goes ahead."""
        tokens, dtype = value(self.program.capture.inputs[0]).shape[1], self.dtype
        made: Lowering | None = None
        for node in self.order:
            made = made or Lowering(tokens, dtype, self.program.settled, self.writer.place)
            if made.add(node):
                continue
            if any(given in made.nodes for given in self.writer.inputs(node)):
                self.close(made)
                made = None
            self.lines.append(f"{self.program.label[node]} = {self.writer.call(node)}")
        if made is not None and made.steps:
            self.close(made)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.program.capture.root.parameters())).dtype

    def close(self, made: Lowering) -> None:
        """Write the call of a segment."""
        label, readers = self.program.label, self.readers
        read = [node for node in self.order if node in made.nodes]
        read = [node for node in read if any(r not in made.nodes for r in readers.get(node, []))]
        wanted = [step.what for step in made.steps if isinstance(step.what, fx.Node)]
        weights = {node: self.program.names[label[node]].contiguous() for node in wanted}
        given = [one if isinstance(one, str) else label[one] for one, _ in made.inputs]
        self.emit(read, Segment(made, read, weights, self.call), [ATTEND, *given])

    def emit(self, results: Sequence[fx.Node], part: Any, given: Sequence[str]) -> None:
        told = ", ".join(self.program.label[node] for node in results)
        self.lines.append(f"[{told}] = parts[{len(self.parts)}]({', '.join(given)})")
        self.parts.append(part)


def variant_of_few(
    program: Program, results: Sequence[fx.Node], instead: Mapping[fx.Node, fx.Node | str]
) -> Callable[..., list[Tensor]] | None:
    """As `Program.variant`, for few tokens of one batch laid end to end, with segments wherever
    operations can be steps; None where there are no operations in C."""
    call = operation("segment", next(iter(program.capture.root.parameters())).dtype)
    if call is None:
        return None
    made = FewTokens(program, results, instead, call)
    inputs = [program.label[node] for node in program.capture.inputs]
    extra = [f"{name}=None" for name in EXTRA] if instead else []
    run = program.compile("run", ["parts", *inputs, ATTEND, *extra], made.lines)
    return partial(run, made.parts)
