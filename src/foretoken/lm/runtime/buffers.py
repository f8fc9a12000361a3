"""Layers of one shape and the buffers that they share, one slot per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foretoken.lm.runtime.pages import Pages
from foretoken.native.columns import Mover, movers


@dataclass(slots=True, eq=False)
class Group:
    """Layers of one shape and their shared buffers."""

    layers: list[Any]  # of the cache that made it
    keys: Tensor  # [layers, slots, heads, columns, dim]
    values: Tensor
    pages: Sequence[Pages] = ()  # what the buffers lie in, where that can be given back in part
    movers: list[Mover] | None = None  # of keys and values as they lie, once asked for

    def gathered(self, slot: int, columns: Sequence[int], to: int) -> bool:
        """Move ascending columns of a row to follow each other from column `to` on, which is not
        behind the first of them, in C; False where this cannot be had."""
        if self.movers is None:
            self.movers = movers(self.keys, self.values)
        for mover in self.movers:
            mover.gather(slot, columns, to)
        return bool(self.movers)

    def attach(self) -> None:
        for i, layer in enumerate(self.layers):
            layer.keys, layer.values = self.keys[i], self.values[i]

    def leave(self, count: int) -> None:
        """Forget the first layers."""
        self.layers = self.layers[count:]
        self.keys, self.values, self.movers = self.keys[count:], self.values[count:], None
        self.pages = ()  # they begin with the layers that are gone

    def empty(self) -> None:
        """Keep the shape alone, and give the memory back."""
        self.keys, self.values = self.keys[:, :0].clone(), self.values[:, :0].clone()
        self.pages, self.movers = (), None
        self.attach()

    def give_back(self, layer: int, slot: int | None = None, first: int = 0) -> None:
        """Memory of a layer, or of a slot's columns from the `first` on in it, that nobody will
        read: it is zero again, but for parts of pages at its ends."""
        for buffer, pages in zip((self.keys, self.values), self.pages, strict=False):
            place = buffer[layer] if slot is None else buffer[layer, slot]
            for part in place[:, first:] if first else (place,):  # columns of each head by itself
                start = int(part.storage_offset()) * buffer.element_size()
                pages.give_back(start, start + int(part.nbytes))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Groups of equal kind can share buffers."""
        keys, values = self.keys, self.values
        return keys.shape[2], keys.shape[4], values.shape[4], keys.dtype, str(keys.device)
