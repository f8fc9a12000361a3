"""Columns of the slot cache that go on standing, moved in C: torch's operations take a copy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from foretoken.native.library import Call, operation


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves columns within one buffer of keys or values, for as long as it lies where it does."""

    call: Call
    address: int
    slot: int  # bytes from one to the next
    form: tuple[int, ...]  # layers, heads, and elements between them; of a column
    columns: int

    def gather(self, slot: int, columns: Sequence[int], to: int) -> None:
        """Have ascending columns of a slot follow each other from column `to` on, in all layers;
        `to` is not behind the first of them."""
        assert columns[-1] < self.columns, "a column that the buffer does not have"
        moved = array("q", columns)
        address, count = moved.buffer_info()
        self.call(self.address + slot * self.slot, *self.form, address, count, to)


def movers(*buffers: Float[Tensor, "layers slots heads columns size"]) -> list[Mover]:
    """One for each of these; none where this cannot be had in C."""
    found = []
    for buffer in buffers:
        call = operation("columns", buffer.dtype) if buffer.is_cpu else None
        layers, _, heads, columns, size = buffer.shape
        layer, slot, head, column, number = buffer.stride()
        if call is None or (column, number) != (size, 1):
            return []
        form = layers, layer, heads, head, size
        found.append(Mover(call, buffer.data_ptr(), slot * buffer.element_size(), form, columns))
    return found
