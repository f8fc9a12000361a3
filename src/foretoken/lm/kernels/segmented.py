"""Variants of a captured forward in which stretches of operations are calls in C (`segments`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from foretoken.lm.kernels.capture import IDS, POSITIONS
from foretoken.lm.kernels.linears import Product
from foretoken.lm.kernels.lowering import LookUp, Lowering
from foretoken.lm.kernels.merged import Merged
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
        self.by_torch: list[fx.Node] = []
        self.copied = set[fx.Node]()  # settled values that are known as they were at some time
        self.flat = set[fx.Node]()  # logits that are made without a dimension of rows
        self.lines: list[Line] = []
        self.parts: list[Any] = []  # what the lines call
        self.tables: list[tuple[Sequence[fx.Node], PositionTable]] = []
        self.look_ups: dict[fx.Node, LookUp] = {}  # written where they are read, or in front
        self.read_by_position()
        self.read_by_token()
        self.write()
        said = [self.writer.said(node) for node in results]
        made = [name if node in self.flat else self.writer.result(node)
                for name, node in zip(said, results, strict=True)]  # fmt: skip
        self.lines.append(Line(f"return [{', '.join(made)}]", said, ()))
        self.look_up()

    def read_by_position(self) -> None:
        """Have what depends on positions alone read from tables."""
        known, read = by_position(self.program, self.order)
        tables, key = self.program.tables, tuple(read)
        if read and key not in tables:
            tables[key] = PositionTable.of(self.program, read)
        table = tables.get(key)
        if table is None:
            return
        self.order = [node for node in self.order if node not in known or self.is_size(node)]
        self.tables.append((read, table))
        settled = self.program.settled
        self.copied |= {given for node in known for given in node.all_input_nodes} & {*settled}
        for i, node in enumerate(read):
            self.look_ups[node] = LookUp(POSITIONS, partial(table.rows, i), table.grow)

    def read_by_token(self) -> None:
        """Have embeddings of the tokens read where they are wanted."""
        capture = self.program.capture
        for node in self.order:
            if node.target is A.embedding.default and node.args[1] is capture.inputs[IDS]:
                weight: Any = node.args[0]
                if weight in capture.weights:
                    self.look_ups[node] = LookUp(IDS, partial(self.weight, weight))

    def weight(self, node: fx.Node) -> Tensor:
        """As it lies now, or a copy in the usual order."""
        found: Tensor = self.program.names[self.program.label[node]]
        if node not in self.program.capture.weights or not found.is_contiguous():
            self.copied.add(node)
        return found.contiguous()

    def made_of(self) -> list[Tensor]:
        """The weights that this variant may know by a copy: those that tables and other constants
        were computed from, and those of products that are no steps."""
        weights, settled = self.program.capture.weights, self.program.settled
        found: list[Tensor] = []
        waiting = [*self.copied]
        for node in self.by_torch:
            waiting += [n for n in self.writer.inputs(node) if n in settled and n not in weights]
            site = getattr(node.target, "__self__", None)
            if isinstance(site, Product | Merged):
                found += [module.weight for module in site.modules]
                found += [module.bias for module in site.modules if module.bias is not None]
        seen = set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += node.all_input_nodes
        return found + [weights[node].now() for node in seen if node in weights]

    def look_up(self) -> None:
        """Look up in front of all lines what one of them reads, and the inputs' sizes."""
        behind, self.lines = self.lines, []
        label, inputs = self.program.label, self.program.capture.inputs
        read = {name for line in behind for name in line.reads}
        for nodes, table in self.tables:
            if any(label[node] in read for node in nodes):
                self.emit(nodes, table, [label[inputs[POSITIONS]]])
        for node in self.order:
            if label[node] in read and (node in self.look_ups or self.is_size(node)):
                self.operation(node)
        self.lines += behind

    def is_size(self, node: fx.Node) -> bool:
        """Whether it is how many rows or tokens an input has."""
        return node.target is A.sym_size.int and node.args[0] in self.program.capture.inputs

    def operation(self, node: fx.Node) -> None:
        """Write one of torch's operations."""
        self.by_torch.append(node)
        label = self.program.label
        reads = [label[given] for given in self.writer.inputs(node)]
        self.lines.append(Line(f"{label[node]} = {self.writer.call(node)}", reads, [label[node]]))

    def write(self) -> None:
        """Operations in their order; one that is no step, and waits for none, goes ahead."""
        made: Lowering | None = None
        for node in self.order:
            made = made or self.begun()
            if node in self.look_ups or self.is_size(node) or made.add(node):
                continue
            if any(given in made.nodes for given in self.writer.inputs(node)):
                self.close(made)
                made = None
            self.operation(node)
        if made is not None and made.steps:
            self.close(made)

    def begun(self) -> Lowering:
        """A stretch that has no steps yet."""
        ids, _, places = map(value, self.program.capture.inputs)
        counts = [ids.shape[1], places.shape[0]]
        look_ups = self.look_ups if self.whole else {}
        dtype, settled = weights_type(self.program), self.program.settled
        return Lowering(
            counts, dtype, settled, self.writer.place, self.program.forms, self.whole, look_ups
        )

    def close(self, made: Lowering) -> None:
        """Write the call of a segment."""
        label, readers = self.program.label, self.readers
        read = [node for node in self.order if node in made.nodes]
        read = [node for node in read if any(r not in made.nodes for r in readers.get(node, []))]
        wanted = [step.what for step in made.steps if isinstance(step.what, fx.Node)]
        weights = {node: self.weight(node) for node in wanted}
        given = [one.node if isinstance(one.node, str) else label[one.node] for one in made.inputs]
        inputs = [label[node] for node in self.program.capture.inputs] if self.whole else []
        logits = self.program.capture.logits
        if self.whole and logits in read and readers[logits] == [None]:
            self.flat.add(logits)
        part = self.stretch(made, read, weights, self.flat)
        self.emit(read, part, [ATTEND, *inputs, *given])

    def emit(self, results: Sequence[fx.Node], part: Any, given: Sequence[str]) -> None:
        makes = [self.program.label[node] for node in results]
        text = f"[{', '.join(makes)}] = parts[{len(self.parts)}]({', '.join(given)})"
        self.lines.append(Line(text, given, makes))
        self.parts.append(part)

    def in_one_call(self) -> Segment | None:
        """The segment that is all there is, if it reads tokens alone, or what stands for their
        embeddings, and makes logits alone."""
        if len(self.lines) != 2 or len(self.parts) != 1 or not self.flat:
            return None
        [part] = self.parts
        alone = isinstance(part, Segment) and len(part.results) == 1
        alone = alone and tuple(one.node for one in part.given) in ((), EXTRA[:1])
        return part if alone else None

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


@dataclass(frozen=True, slots=True)
class Written:
    """The code of a variant, the weights that it may know by a copy, and the segment that it is,
    where it makes logits by that one call and no more."""

    run: Callable[..., list[Tensor]]
    made_of: list[Tensor]
    alone: Segment | None


def weights_type(program: Program) -> torch.dtype:
    return next(iter(program.capture.root.parameters())).dtype


def segmented(
    program: Program,
    results: Sequence[fx.Node],
    instead: Mapping[fx.Node, fx.Node | str],
    whole: bool,
) -> Written | None:
    """As `Program.variant`, for tokens of one batch laid end to end, with segments wherever
    operations can be steps (`whole`: products and attention too, for few tokens); None where there
    are no operations in C."""
    call = operation("segment" if whole else "between", weights_type(program))
    if call is None:
        return None
    stretch = partial(Segment if whole else Between, call=call)
    made = Segmented(program, results, instead, stretch, whole)
    inputs = [program.label[node] for node in program.capture.inputs]
    extra = [f"{name}=None" for name in EXTRA] if instead else []
    run = program.compile("run", ["parts", *inputs, ATTEND, *extra], made.code())
    return Written(partial(run, made.parts), made.made_of(), made.in_one_call())
