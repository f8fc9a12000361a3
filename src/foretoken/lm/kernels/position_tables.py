"""What a captured forward computes from positions alone (rotations, mostly), kept in tables.

A forward of few tokens spends a dozen small operations on it; with tables it looks numbers up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from foretoken.lm.kernels.capture import POSITIONS
from foretoken.lm.kernels.rewrites import A, value
from foretoken.lm.kernels.straight_line import Program

FIRST = 512  # positions of a new table; it doubles when more are asked for
MORE = 64  # beyond those asked for, where it cannot double
TRIED = 8


def by_position(program: Program, order: Sequence[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
    """Nodes of `order` that depend on positions alone, and those of them that others read."""
    ids, positions, _ = program.capture.inputs
    found: set[fx.Node] = set()
    for node in order:
        sources = [given for given in node.all_input_nodes if given not in program.settled]
        sizes = node.target is A.sym_size.int and sources[0] in (ids, positions)
        if sizes or (sources and all(given in found or given is positions for given in sources)):
            found.add(node)
    read = [
        node for node in order
        if node in found and any(user not in found for user in node.users)
        and node.target is not A.sym_size.int
    ]  # fmt: skip
    return found, read


class PositionTable:
    """Values of several nodes for every position up to a number that grows."""

    __slots__ = ("axes", "compute", "tables")

    def __init__(self, compute: Callable[[Tensor], list[Tensor]], axes: Sequence[int]) -> None:
        self.compute, self.axes = compute, tuple(axes)
        self.tables: list[Tensor] = []
        self.grow(2 * TRIED)

    @classmethod
    def of(cls, program: Program, nodes: Sequence[fx.Node]) -> PositionTable | None:
        """For these nodes; None where a token's values depend on other tokens' positions."""
        run = program.variant(nodes)
        tokens = str(value(program.capture.inputs[POSITIONS]).shape[1])
        axes = []
        for node in nodes:
            known = value(node)
            sizes = known.shape if isinstance(known, Tensor) else ()
            named = [i for i, size in enumerate(sizes) if str(size) == tokens]
            if len(named) != 1:
                return None
            axes += named

        def compute(positions: Tensor) -> list[Tensor]:
            return run(positions.new_zeros(positions.shape), positions, None, None)

        forth = torch.arange(2 * TRIED)[None]
        whole, back, half = compute(forth), compute(forth.flip(1)), compute(forth[:, :TRIED])
        for axis, some, turned, first in zip(axes, whole, back, half, strict=True):
            same = torch.equal(turned.flip(axis), some)
            if not same or not torch.equal(first, some.narrow(axis, 0, TRIED)):
                return None
        return cls(compute, axes)

    def grow(self, positions: int) -> None:
        """Have at least so many; twice as many as before, unless a model has no more of them."""
        longest = self.tables[0].shape[self.axes[0]] if self.tables else 0
        if positions <= longest:
            return
        for count in (max(2 * longest, positions, FIRST), positions + MORE, positions):
            try:
                self.tables = self.compute(torch.arange(count)[None])
                return
            except (IndexError, RuntimeError):  # beyond embeddings of positions
                if count == positions:
                    raise

    def rows(self, which: int) -> Tensor:
        """One of the tables, whose positions lie one behind another."""
        return self.tables[which].movedim(self.axes[which], 0).contiguous()

    def __call__(self, positions: Tensor) -> list[Any]:
        """The nodes' values at `positions` [1, Q]."""
        wanted = positions[0]
        self.grow(int(wanted.max()) + 1)
        return [
            torch.index_select(table, axis, wanted)
            for table, axis in zip(self.tables, self.axes, strict=True)
        ]
