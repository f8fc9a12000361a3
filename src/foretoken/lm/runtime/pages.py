"""Memory in pages of the size that suits its use, there once it is written to."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor, nn

from foretoken.lm.runtime.heap import give_back
from foretoken.native.scratch import PRIVATE

DROP = getattr(mmap, "MADV_DONTNEED", None)  # Linux: pages that are zero again when they are read
SMALL = getattr(mmap, "MADV_NOHUGEPAGE", None)  # else one number takes 2 MiB where these are usual
LARGE = getattr(mmap, "MADV_HUGEPAGE", None)
LARGE_BYTES = 2 << 20
ROW = 64  # bytes: weights begin where a line of the processor's cache does


class Pages:
    """One stretch of zeros, of whole pages: small ones, or large where the system has them."""

    __slots__ = ("memory",)

    def __init__(self, size: int, large: bool = False) -> None:
        self.memory = mmap.mmap(-1, size, **PRIVATE)
        advice = LARGE if large else SMALL
        if advice is not None:
            with suppress(OSError):  # a kernel without large pages
                self.memory.madvise(advice)

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


def into_large_pages(model: nn.Module) -> None:
    """Lay a model's weights on a CPU end to end, in large pages.

    A forward of few tokens is a read of all weights. In pages of 4 KiB the processor has to find
    an address for every fourteenth row of a layer, and stops asking ahead at their ends.
    """
    weights = [
        weight for weight in model.parameters()
        if type(weight.data) is Tensor and weight.is_cpu and weight.is_contiguous()
        and weight.numel()
    ]  # fmt: skip
    sizes = [-(-weight.nbytes // ROW) * ROW for weight in weights]
    if LARGE is None or sum(sizes) < LARGE_BYTES:
        return
    memory = Pages(sum(sizes) + LARGE_BYTES, large=True).memory
    at = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE_BYTES
    for weight, size in zip(weights, sizes, strict=True):
        # a storage for each, which none shares with another: savers look for those
        place = torch.frombuffer(memory, dtype=weight.dtype, count=weight.numel(), offset=at)
        weight.data = place.view(weight.shape).copy_(weight.data)
        at += size
    give_back()  # where they lay before
