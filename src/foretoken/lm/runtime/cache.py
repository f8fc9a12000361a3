"""A preallocated key-value cache with one slot per row, grown by doubling, or as a plan grants.

Buffers are `[layers, slots, heads, columns, dim]`, one per shape of layer, so that a row is moved
or compacted in a few operations however many layers there are. They are zero-filled: a masked
column still takes part as zero times its value, and stray NaNs would spread.

On a CPU a page of a buffer takes memory once something is written to it, and gives it back when its
slot has no row any more: what is resident follows the rows' own lengths, whatever the largest is.

Layers are copied into new buffers one at a time, and their old memory is given back at once: no
growth holds two whole caches. Where a plan of memory grants a size, that is the size, all of it
held from the first forward on, so that nothing is promised twice; on devices without such pages
layers then lie in several buffers, which are made anew one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from foretoken.lm.runtime.buffers import Group
from foretoken.lm.runtime.pages import zeros

Columns = tuple[Tensor, Tensor, Tensor, Tensor]  # keys and values to write, then to read
WHOLE = 16  # columns of a granted size are a multiple of it
FEW = 64  # columns that stay in memory rather than be given back one by one
PARTS = 16  # buffers of the layers of one kind on a device, where the size is granted


@dataclass(slots=True)
class Target:
    """Where the next forward writes and reads."""

    first: int  # slot of the first row
    count: int  # rows
    start: int  # first column written, for a single row
    width: int  # columns written per row
    longest: int  # columns read
    cells: tuple[Tensor, Tensor] | None = None  # slot and column of every query of several rows
    scattered: Tensor | None = None  # the slots, where they are not neighbours


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's view of the buffers. Windows live in masks; `low` only spares reading."""

    is_sliding = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self.low = 0  # columns before this are seen by no query of the forward

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        group = self.owner.blank([self], key_states, value_states)
        group.attach()
        self.owner.groups.append(group)
        self.owner.loose = True
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self.owner.target
        assert self.keys is not None and self.values is not None
        if at.cells is None:
            stop = at.start + at.width
            self.keys[at.first, :, at.start : stop] = key_states[0]
            self.values[at.first, :, at.start : stop] = value_states[0]
        else:
            rows, columns = (index.to(self.keys.device) for index in at.cells)
            self.keys[rows, :, columns] = key_states.transpose(1, 2)
            self.values[rows, :, columns] = value_states.transpose(1, 2)
        keys = self.keys[:, :, self.low : at.longest]
        values = self.values[:, :, self.low : at.longest]
        if at.scattered is not None:
            slots = at.scattered.to(keys.device)
            return keys.index_select(0, slots), values.index_select(0, slots)
        last = at.first + at.count
        return keys[at.first : last], values[at.first : last]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.target.longest, 0

    def get_seq_length(self) -> int:
        return self.owner.target.longest - self.owner.target.width

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """Keys and values of all rows; the only user of `past_key_values`."""

    def __init__(self, layers: int, slots: int = 1, columns: int = 128) -> None:
        self.rows_of = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.rows_of))
        self.slots, self.columns = slots, columns
        self.groups: list[Group] = []
        self.made = 0  # times that buffers were made anew
        self.exact = False  # sizes are those granted, not doubled ones
        self.due: tuple[int, int] | None = None  # slots and columns of the next forward
        self.used = 0  # first slots that hold a row
        self.filled = [0] * slots  # columns of each slot that may have been written
        self.loose = False  # layers came with buffers of their own, not shared yet
        self.shared = False  # when buffers were last made, every layer got a part of them
        self.target = Target(0, 1, 0, 0, 0)
        self.lowered = False  # some layers leave the first columns out

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.rows_of[layer_idx].update(key_states, value_states)

    def blank(self, layers: list[SlotLayer], keys: Tensor, values: Tensor) -> Group:
        """Zeroed buffers for layers whose states look like `keys` and `values`."""
        shape = (len(layers), self.slots, keys.shape[-3], self.columns)
        made = [zeros((*shape, states.shape[-1]), states) for states in (keys, values)]
        (keys, behind), (values, beside) = made
        pages = () if behind is None or beside is None else (behind, beside)
        return Group(layers, keys, values, pages)

    def grant(self, slots: int, columns: int) -> None:
        """Have this size, and no more, from the next forward on; one that asks for more gets that.

        What lies in slots that are used has to fit.
        """
        self.exact, self.due = True, (slots, rounded(columns))

    def takes(self, columns: int) -> bool:
        """Whether rows may have so many columns without more than was granted."""
        granted = self.columns if self.due is None else self.due[1]
        return not self.exact or columns <= granted

    def reserve(self, rows: Sequence[int], stops: Sequence[int]) -> None:
        """Room for rows in these slots, whose columns up to `stops` are about to be written; what
        is cached stays."""
        self.fit(max(rows) + 1, max(stops))
        for slot, stop in zip(rows, stops, strict=True):
            if stop > self.filled[slot]:
                self.filled[slot] = stop

    def fit(self, slots: int, columns: int) -> None:
        """Buffers of at least this size, or of the one that was granted; where there is no memory
        for them, others go on with those that there are."""
        before = self.slots, self.columns, self.due
        try:
            self.resize(slots, columns)
        except BaseException:
            self.slots, self.columns, self.due = before
            raise

    def resize(self, slots: int, columns: int) -> None:
        """Buffers of at least this size, or of the one that was granted."""
        if self.due is not None:
            held = max((rounded(one) for one in self.filled[: self.used]), default=0)
            wanted = max(slots, self.due[0], self.used), max(rounded(columns), self.due[1], held)
            self.due = None
            if wanted != (self.slots, self.columns) or self.loose:
                self.slots, self.columns = wanted
                self.rebuild()
            return
        if slots <= self.slots and columns <= self.columns and not self.loose:
            return
        if self.exact:
            self.slots = max(self.slots, slots)
            self.columns = max(self.columns, rounded(columns))
        while self.slots < slots:
            self.slots *= 2
        while self.columns < columns:
            self.columns *= 2
        self.rebuild()

    def rebuild(self) -> None:
        """New buffers of the present size, shared by all layers of a kind, or by a part of them."""
        self.loose = False
        self.made += 1
        self.filled += [0] * (self.slots - len(self.filled))
        kinds: dict[tuple[Any, ...], list[Group]] = {}
        for group in self.groups:
            kinds.setdefault(group.kind, []).append(group)
        self.groups = []
        try:
            for groups in kinds.values():
                if self.exact and self.used == 0:
                    for group in groups:
                        group.empty()
                count = sum(len(group.layers) for group in groups)
                whole = not self.exact or groups[0].keys.is_cpu
                part = count if whole else -(-count // PARTS)
                while groups:
                    self.groups.append(self._merged(groups, part))
        except BaseException:  # those without new buffers keep their own
            self.groups += [group for groups in kinds.values() for group in groups]
            self.loose = True
            raise
        self.shared = sum(len(group.layers) for group in self.groups) == len(self.rows_of)

    def _merged(self, groups: list[Group], part: int) -> Group:
        """The first `part` layers of these groups in buffers of their own; they leave the groups,
        and who has none left gives its memory back."""
        first = groups[0]
        taken: list[tuple[Group, int]] = []
        for group in groups:
            taken += [(group, i) for i in range(len(group.layers))][: part - len(taken)]
        merged = self.blank([group.layers[i] for group, i in taken], first.keys[0], first.values[0])
        for at, (group, i) in enumerate(taken):
            if self.exact:  # written, and held from now on
                merged.keys[at].zero_(), merged.values[at].zero_()
            # the newest rows have a slot, but no buffer yet
            for slot in range(min(self.slots, group.keys.shape[1])):
                columns = min(self.filled[slot], group.keys.shape[3], self.columns)
                pairs = ((group.keys, merged.keys), (group.values, merged.values))
                for old, new in pairs if columns else ():
                    new[at, slot, :, :columns] = old[i, slot, :, :columns]
            group.give_back(i)
        merged.attach()
        while groups and (gone := len([1 for group, _ in taken if group is groups[0]])):
            if gone < len(groups[0].layers):
                groups[0].leave(gone)
                break
            del groups[0]
        return merged

    def aim(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        width: int,
        longest: int,
        lows: Mapping[int, int],
        device: torch.device,
    ) -> None:
        """Point the next forward at rows of ascending `slots`; `lows`: layer -> first column."""
        first, count = slots[0], len(slots)
        self.target = target = Target(first, count, starts[0], width, longest)
        if lows or self.lowered:
            for index, layer in enumerate(self.rows_of):
                layer.low = lows.get(index, 0)
            self.lowered = bool(lows)
        if count == 1:
            return
        columns = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
        rows = torch.tensor(slots, device=device)
        target.cells = rows[:, None].expand_as(columns), columns
        if slots[-1] - first + 1 != count:
            target.scattered = rows

    @property
    def in_place(self) -> bool:
        """Whether all layers share their buffers, and each of them reads a row from its start."""
        return self.shared and not self.loose and not self.lowered

    def lone_columns(self) -> list[Columns] | None:
        """For each layer, where a forward over one row writes keys and values, and what it reads.

        Views of the shared buffers, made for all layers at once; None for several rows, and before
        the layers share their buffers.
        """
        at = self.target
        if at.cells is not None or not self.in_place:
            return None
        found: dict[int, Columns] = {}
        stop = at.start + at.width
        for group in self.groups:
            keys = group.keys[:, at.first : at.first + 1]
            values = group.values[:, at.first : at.first + 1]
            views = (
                keys[..., at.start : stop, :].unbind(),
                values[..., at.start : stop, :].unbind(),
                keys[..., : at.longest, :].unbind(),
                values[..., : at.longest, :].unbind(),
            )
            found.update(zip(map(id, group.layers), zip(*views, strict=True), strict=True))
        return [found[id(layer)] for layer in self.rows_of]

    @property
    def column_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        group = self.groups[0]
        return (group.keys.shape[2] * (group.keys.shape[4] + group.values.shape[4])
                * group.keys.element_size())  # fmt: skip

    def kept(self, layer: int, slot: int, columns: int) -> tuple[Tensor, Tensor] | None:
        """Views of a row's first columns in a layer; None where none were ever written."""
        keys, values = self.rows_of[layer].keys, self.rows_of[layer].values
        if keys is None or values is None or slot >= len(keys):
            return None
        return keys[slot, :, :columns], values[slot, :, :columns]

    def copied(self, slot: int, columns: int) -> list[tuple[Tensor, Tensor]] | None:
        """A row's first columns, copied; None before the layers share their buffers."""
        if self.loose or not self.groups:
            return None
        return [
            (group.keys[:, slot, :, :columns].clone(), group.values[:, slot, :, :columns].clone())
            for group in self.groups
        ]

    def put(self, slot: int, copies: Sequence[tuple[Tensor, Tensor]], columns: int) -> bool:
        """Lay down the first of copied columns in a row; False where buffers changed since."""
        if self.loose or len(copies) != len(self.groups):
            return False
        for group, (keys, values) in zip(self.groups, copies, strict=True):
            group.keys[:, slot, :, :columns] = keys[:, :, :columns]
            group.values[:, slot, :, :columns] = values[:, :, :columns]
        return True

    def keep(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Move columns `start + nodes[i]` of a row to `start + i`; `nodes` ascend."""
        at = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        if at == len(nodes) or not self.groups:
            return
        moved = [start + n for n in nodes[at:]]
        for group in self.groups:
            if group.gathered(slot, moved, start + at):
                continue
            index = torch.tensor(moved, device=group.keys.device)
            for buffer in (group.keys, group.values):
                row = buffer[:, slot]  # [layers, heads, columns, dim]
                row[:, :, start + at : start + len(nodes)] = row.index_select(2, index)

    def shift(self, slot: int, source: int, target: int, count: int) -> None:
        """Move `count` columns of a row from column `source` on to column `target` on."""
        for group in self.groups:
            for buffer in (group.keys, group.values):
                row = buffer[:, slot]  # [layers, heads, columns, dim]
                row[:, :, target : target + count] = row[:, :, source : source + count].clone()

    def move(self, source: int, target: int) -> None:
        """Copy a row into another slot, with columns that only some layers have filled."""
        if source >= self.slots:
            self.vacate(target)  # nothing was fed to that row yet
            return
        columns, held = self.filled[source], self.filled[target]
        if held > columns + FEW:
            self.vacate(target, columns)
        self.filled[target] = max(self.filled[target], columns)
        for group in self.groups:
            for buffer in (group.keys, group.values):
                buffer[:, target, :, columns : min(held, columns + FEW)] = 0
                buffer[:, target, :, :columns] = buffer[:, source, :, :columns]

    def vacate(self, slot: int, columns: int = 0) -> None:
        """Give back a slot's memory but for that of so many columns, or zero it where it stays."""
        if slot >= len(self.filled) or self.filled[slot] <= columns:
            return
        held, self.filled[slot] = self.filled[slot], columns
        for group in self.groups:
            if self.exact or not group.pages:  # whatever failed there would spoil who comes next
                for buffer in (group.keys, group.values):
                    buffer[:, slot : slot + 1, :, columns:held] = 0
                continue
            for layer in range(len(group.layers)) if slot < group.keys.shape[1] else ():
                group.give_back(layer, slot, columns)


def rounded(columns: int) -> int:
    """Columns as they are granted."""
    return -(-columns // WHOLE) * WHOLE
