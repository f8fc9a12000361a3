"""Variants of a captured forward in which stretches of operations are calls in C (`segments`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from foretoken.lm.kernels.lowering import Lowering
from foretoken.lm.kernels.position_tables import PositionTable, by_position
from foretoken.lm.kernels.rewrites import A, value
from foretoken.lm.kernels.segments import Between, Segment, Stretch
from foretoken.lm.kernels.straight_line import ATTEND, EXTRA, Program, Writer
from foretoken.native.library import operation


@dataclass(frozen=True, slots=True)
class Line:
    """A line of code, the names that it reads, and those that it makes."""

    text: str
    reads: Sequence[str]
    makes: Sequence[str]


class Segmented:
    """Writes a variant for tokens of one batch laid end to end.

    `whole`: for few tokens, products and attention are steps of segments; else these lie between.
    """

    def __init__(
        self,
        program: Program,
        results: Sequence[fx.Node],
        instead: Mapping[fx.Node, fx.Node | str],
        stretch: Callable[..., Stretch],
        whole: bool,
    ) -> None:
        self.program, self.stretch, self.whole = program, stretch, whole
        self.writer = Writer(program, instead)
        needed = self.writer.needed(results)
        self.order = [node for node in program.capture.graph.nodes if node in needed]
        self.readers: dict[Any, list[Any]] = {self.writer.place(node): [None] for node in results}
        for node in self.order:
            for given in self.writer.inputs(node):
                self.readers.setdefault(given, []).append(node)
        self.lines: list[Line] = []
        self.parts: list[Any] = []  # what the lines call
        self.look_up()
        self.write()
        said = [self.writer.said(node) for node in results]
        self.lines.append(Line(f"return [{', '.join(said)}]", said, ()))

    def look_up(self) -> None:
        """Read from tables what depends on positions alone."""
        known, read = by_position(self.program, self.order)
        tables, key = self.program.tables, tuple(read)
        if read and key not in tables:
            tables[key] = PositionTable.of(self.program, read)
        table = tables.get(key)
        if table is not None:
            kept = [node for node in known if node.target is A.sym_size.int]
            self.order = [node for node in self.order if node not in known or node in kept]
            self.emit(read, table, [self.program.label[self.program.capture.inputs[1]]])

    def write(self) -> None:
        """Operations in their order; one that is no step, and waits for none, goes ahead."""
        tokens, dtype = value(self.program.capture.inputs[0]).shape[1], self.dtype
        settled, label = self.program.settled, self.program.label
        made: Lowering | None = None
        for node in self.order:
            made = made or Lowering(tokens, dtype, settled, self.writer.place, self.whole)
            if made.add(node):
                continue
            if any(given in made.nodes for given in self.writer.inputs(node)):
                self.close(made)
                made = None
            reads = [label[given] for given in self.writer.inputs(node)]
            text = f"{label[node]} = {self.writer.call(node)}"
            self.lines.append(Line(text, reads, [label[node]]))
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
        given = [one.node if isinstance(one.node, str) else label[one.node] for one in made.inputs]
        self.emit(read, self.stretch(made, read, weights), [ATTEND, *given])

    def emit(self, results: Sequence[fx.Node], part: Any, given: Sequence[str]) -> None:
        makes = [self.program.label[node] for node in results]
        text = f"[{', '.join(makes)}] = parts[{len(self.parts)}]({', '.join(given)})"
        self.lines.append(Line(text, given, makes))
        self.parts.append(part)

    def code(self) -> list[str]:
        """The lines; what a line makes is given back behind the last one that reads it."""
        last = {name: i for i, line in enumerate(self.lines) for name in (*line.reads, *line.makes)}
        made = {name for line in self.lines for name in line.makes}
        text = []
        for i, line in enumerate(self.lines):
            text.append(line.text)
            names = dict.fromkeys((*line.reads, *line.makes))
            over = [name for name in names if name in made and last[name] == i]
            if over and i + 1 < len(self.lines):
                text.append(f"del {', '.join(over)}")
        return text


def segmented(
    program: Program,
    results: Sequence[fx.Node],
    instead: Mapping[fx.Node, fx.Node | str],
    whole: bool,
) -> Callable[..., list[Tensor]] | None:
    """As `Program.variant`, for tokens of one batch laid end to end, with segments wherever
    operations can be steps (`whole`: products and attention too, for few tokens); None where there
    are no operations in C."""
    dtype = next(iter(program.capture.root.parameters())).dtype
    call = operation("segment" if whole else "between", dtype)
    if call is None:
        return None
    stretch = partial(Segment if whole else Between, call=call)
    made = Segmented(program, results, instead, stretch, whole)
    inputs = [program.label[node] for node in program.capture.inputs]
    extra = [f"{name}=None" for name in EXTRA] if instead else []
    run = program.compile("run", ["parts", *inputs, ATTEND, *extra], made.code())
    return partial(run, made.parts)
