"""Products of linear layers that read the same input, as one product where that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.lm.kernels.linears import (
    BLOCKS,
    DENSE,
    LISTED,
    NATIVE,
    PACKED,
    PADDED,
    Product,
    in_blocks,
    multiply_padded,
    onednn,
)
from foretoken.native import library as native


class Merged:
    """Several linear layers over one input; their packed copy holds all weights, one below another.

    Kernels that work on dense weights need no copy; those of libraries stay separate products.
    """

    __slots__ = (
        "bias",
        "dtype",
        "kernels",
        "many",
        "packed",
        "parts",
        "places",
        "read",
        "sizes",
        "width",
    )

    def __init__(self, parts: Sequence[Product]) -> None:
        self.parts = tuple(parts)
        self.width, self.dtype = parts[0].width, parts[0].dtype
        self.sizes = [part.matrix.shape[0] for part in parts]
        self.packed: Tensor | None = None
        self.bias: Tensor | None = None
        self.kernels: list[int] = [DENSE] * (LISTED + 1)
        self.many = DENSE
        self.read: Any = None  # states of the fingerprints when the weights were read last
        self.place()

    def place(self) -> None:
        """Where the parts' weights are, for products in C: these need no merged copy."""
        self.places = native.places([(part.matrix, part.bias) for part in self.parts])

    @property
    def modules(self) -> tuple[Any, ...]:
        """The linear layers whose weights this holds."""
        return tuple(part.module for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.sizes, self.width)

    def multiply(self, x: Tensor) -> Any:
        """The products of every part, by the kernel chosen for this many rows."""
        rows = x.numel() // self.width
        return self.run(self.kernels[rows] if rows <= LISTED else self.many, x)

    def run(self, kernel: int, x: Tensor) -> Any:
        if kernel == PACKED:
            whole = onednn(x, self.packed, self.bias, "none", [], "")
            return torch.split_with_sizes(whole, self.sizes, -1)
        if kernel == NATIVE and self.places is not None:
            return torch.split_with_sizes(self.places.multiply(x), self.sizes, -1)
        if kernel == PADDED:
            whole = multiply_padded(x, self.packed, self.bias, self.width)
            return torch.split_with_sizes(whole, self.sizes, -1)
        if kernel == BLOCKS:
            return in_blocks(self, x)
        return [part.run(kernel, x) for part in self.parts]

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """All weights, one below another, and all biases."""
        matrix = torch.cat([part.matrix for part in self.parts])
        biases = [
            matrix.new_zeros(size) if part.bias is None else part.bias
            for part, size in zip(self.parts, self.sizes, strict=True)
        ]
        biased = any(part.bias is not None for part in self.parts)
        return matrix, torch.cat(biases) if biased else None

    def pack(self) -> None:
        with torch.inference_mode(self.parts[0].matrix.is_inference()), torch.no_grad():
            matrix, self.bias = self.dense()
            self.packed = torch.ops.mkldnn._reorder_linear_weight(matrix, 16)

    def pack_once(self) -> None:
        if self.packed is None:
            self.pack()

    def renew(self, read: Any = None) -> None:
        """Follow weights that were replaced or written to; not twice for the same `read` states."""
        if read is not None and read == self.read:
            return
        for part in self.parts:
            part.renew()
        self.place()
        self.read = read
        if self.packed is not None:
            self.pack()

    def follows(self) -> bool:
        """Whether the packed copy holds the weights' numbers, every one of them compared."""
        if self.packed is None:
            return True
        size = torch.int16 if self.dtype is torch.bfloat16 else torch.int32  # NaN equals NaN so
        with torch.no_grad():
            matrix, bias = self.dense()
            same = bias is None or self.bias is None or torch.equal(bias, self.bias)
            return same and torch.equal(self.packed.to_dense().view(size), matrix.view(size))

    def nbytes(self) -> int:
        return sum(part.nbytes() for part in self.parts)


Site = Product | Merged  # one product of a captured model: of a layer, or of several
