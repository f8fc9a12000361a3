"""Views of a TableLM: what its early layers would say is its own table, disturbed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.lm.leaving import Leave
from foretoken.lm.shadow import Shadow, Watched
from foretoken.types import DecodeState

if TYPE_CHECKING:
    from foretoken.lm.table import Memory, TableLM


class TableExits:
    """Early exits of a table: the fewer layers, the more its logits are disturbed."""

    def __init__(self, table: TableLM, marks: Sequence[int], look_back: int | None = None) -> None:
        self.table, self.marks = table, tuple(sorted(marks))
        self.layers, self.head, self.max_length = table.layers, 0.0, table.max_length
        self.wanted: tuple[int, ...] = ()
        if look_back is not None:
            self.wanted = (*self.marks, self.layers)
            table.watched = Watched(self.wanted, look_back)

    def grow(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        depths: Sequence[int],
    ) -> list[Float[Tensor, "n V"]]:
        table = self.table
        assert len({row.uid for row in rows}) == len(rows), "one row twice in a forward"
        table.layers_run += max(depths)
        grown = []
        for row, new, above, depth in zip(rows, tokens, parents, depths, strict=True):
            assert depth in self.marks, f"depth {depth} is none of the exits {self.marks}"
            early = table._memory(row).early
            if above[0] < 0 or early is None:
                early = self._opened(row, depth)
            assert early.depth == depth, "a tree was gone on with at another depth"
            grown.append(table._grow_row(row, early, new, above, disturbed(table, depth)))
        return grown

    def attend(self, row: DecodeState) -> None:
        self._opened(row, self.marks[0])

    def seen(self, row: DecodeState) -> Float[Tensor, "n L V"] | None:
        memory = self.table._memory(row)
        shown, memory.shown = memory.shown, None
        return shown

    def shadows(self, states: Sequence[Float[Tensor, "n L V"]]) -> list[Shadow]:
        laws = [one.softmax(-1) for one in states]
        return [Shadow(law.argmax(-1), law.amax(-1)) for law in laws]

    def _opened(self, row: DecodeState, depth: int) -> Memory:
        memory = self.table._memory(row)
        assert not memory.tokens, "drafting beside an open tree"
        memory.early = memory.opened(depth, self.wanted)
        return memory.early


class TableSkips:
    """A table without some sublayers: each that is missing disturbs it a little."""

    searchable = True

    def __init__(self, table: TableLM) -> None:
        self.table, self.units = table, 2 * (table.layers - 2)
        self.max_length = table.max_length

    def grow(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        skipped: frozenset[int],
    ) -> list[Float[Tensor, "n V"]]:
        table = self.table
        table.layers_run += table.layers - len(skipped) / 2
        logits = without(table, skipped)
        grown = []
        for row, new, above in zip(rows, tokens, parents, strict=True):
            memory = table._memory(row)
            if above[0] < 0 or memory.early is None:
                assert not memory.tokens, "drafting beside an open tree"
                memory.early = memory.opened(0, ())
                memory.early.scratch = True
            grown.append(table._grow_row(row, memory.early, new, above, logits))
        return grown

    def guesses(self, row: DecodeState, count: int, skipped: frozenset[int]) -> list[int]:
        table = self.table
        table.layers_run += table.layers - len(skipped) / 2
        logits = without(table, skipped)
        assert not table._memory(row).tokens, "a search beside an open tree"
        ends = range(row.prompt_len + 1, row.prompt_len + count + 1)
        return [int(table._look_up(logits, row.tokens[:end]).argmax()) for end in ends]


class TableLeaves:
    """Scoring of a table that ends early: what is told is the disturbed table behind that layer.

    A table has nothing to cache by layers, so no token is ever fed again.
    """

    def __init__(self, table: TableLM) -> None:
        self.table, self.layers = table, table.layers

    def behind(self, row: DecodeState) -> int:
        return 0

    def leave(self, row: DecodeState, wish: Leave) -> None:
        self.table._memory(row).leave = wish


def left_early(
    table: TableLM, wish: Leave, contexts: Sequence[Sequence[int]]
) -> Float[Tensor, "N V"]:
    """The logits of all nodes behind the layer where their row leaves."""
    for layer in range(table.layers):
        shown = disturbed(table, layer + 1)
        logits = torch.stack([table._look_up(shown, tokens) for tokens in contexts])
        wish.depth = layer + 1
        if layer in wish.active and layer + 1 < table.layers:
            some = logits.gather(1, wish.candidates)
            if wish.asks(layer, some.float(), logits.argmax(-1).tolist):
                break
    return logits


def without(table: TableLM, skipped: frozenset[int]) -> Float[Tensor, "*context V"]:
    """The table as its other sublayers would have it; always the same for the same ones."""
    logits = table.logits
    for unit in sorted(skipped):
        generator = torch.Generator().manual_seed(unit)
        noise = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        logits = logits + table.disturbance / table.layers * noise
    return logits


def disturbed(table: TableLM, depth: int) -> Float[Tensor, "*context V"]:
    """The table behind `depth` of its layers; always the same for the same depth."""
    if depth == table.layers:
        return table.logits
    generator = torch.Generator().manual_seed(depth)
    noise = torch.randn(table.logits.shape, generator=generator, dtype=torch.float64)
    return table.logits + table.disturbance * (1.0 - depth / table.layers) * noise
