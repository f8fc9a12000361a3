"""Memory that is there once it is written to, and can be given back in part."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

DROP = getattr(mmap, "MADV_DONTNEED", None)  # Linux: pages that are zero again when they are read
SMALL = getattr(mmap, "MADV_NOHUGEPAGE", None)  # else one number takes 2 MiB where these are usual
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


class Pages:
    """One stretch of zeros, of whole pages."""

    __slots__ = ("memory",)

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size, **PRIVATE)
        if SMALL is not None:
            with suppress(OSError):  # a kernel without large pages
                self.memory.madvise(SMALL)

    def give_back(self, start: int, stop: int) -> None:
        """The whole pages between two places."""
        first, last = -(-start // mmap.PAGESIZE), stop // mmap.PAGESIZE
        if DROP is not None and last > first:
            self.memory.madvise(DROP, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


def zeros(shape: Sequence[int], like: Tensor) -> tuple[Tensor, Pages | None]:
    """Zeros of the type and device of another tensor; on a CPU in pages of their own."""
    size = prod(shape) * like.element_size()
    if not like.is_cpu or not size:
        return like.new_zeros(*shape), None
    pages = Pages(size)
    return torch.frombuffer(pages.memory, dtype=like.dtype).view(*shape), pages
