"""Memory for what a forward of many tokens leaves from one operation to the next.

A budget has the C library ask the system for every large block and give it back at once
(`lm.runtime.heap`), so that no plan is exceeded by what is kept; each operation of a prompt then
waits for new pages. Within `used_again` blocks are lent instead: to one tensor at a time, and to
the next once that one is gone, until the forward is over.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from weakref import ref

import torch
from torch import Tensor

LEAST = 128 << 10  # bytes of a block; the C library keeps smaller ones itself
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


class Block:
    """Pages of the system, and whoever they are lent to."""

    __slots__ = ("address", "borrower", "memory", "size")

    def __init__(self, size: int) -> None:
        self.size, self.memory = size, mmap.mmap(-1, size, **PRIVATE)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.borrower: ref[memoryview] | None = None

    @property
    def free(self) -> bool:
        """Whether no tensor lies in it: a tensor's storage holds the view that it was made of."""
        return self.borrower is None or self.borrower() is None

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        view = memoryview(self.memory)
        self.borrower = ref(view)
        return torch.frombuffer(view, dtype=dtype, count=prod(shape)).view(*shape)


@dataclass(slots=True)
class Scratch:
    """The blocks of one forward."""

    blocks: list[Block] = field(default_factory=list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """In the smallest free block that it fits in, or a new one."""
        size = prod(shape) * dtype.itemsize
        fits = [block for block in self.blocks if block.size >= size and block.free]
        if not fits:
            fits = [Block(size)]
            self.blocks += fits
        return min(fits, key=lambda block: block.size).lend(shape, dtype)

    def leave(self, made: list[Tensor]) -> None:
        """Give all blocks back but those that these tensors fill, who are moved out of larger
        ones: they go on, whoever made them is over."""
        places = {block.address: block.size for block in self.blocks}
        self.blocks.clear()
        for i, tensor in enumerate(made):
            if places.get(tensor.data_ptr(), 0) > tensor.nbytes:
                made[i] = tensor.clone()


class Here(threading.local):
    """What forwards of this thread use."""

    scratch: Scratch | None = None


HERE = Here()


@contextmanager
def used_again() -> Iterator[Scratch]:
    """Have `empty` lend the same memory again, in this thread, as long as the context lasts."""
    before, HERE.scratch = HERE.scratch, Scratch()
    try:
        yield HERE.scratch
    finally:
        HERE.scratch = before


def lending() -> bool:
    """Whether this thread is inside `used_again`."""
    return HERE.scratch is not None


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU whose numbers may be anything."""
    scratch = HERE.scratch
    if scratch is None or prod(shape) * dtype.itemsize < LEAST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return scratch.empty(shape, dtype)
