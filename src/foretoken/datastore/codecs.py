"""Vectors made small: principal components first, then few bits per number (arXiv 2505.00105,
2504.08386).

Hidden states share a large common part, so the mean goes first. What is left is projected, brought
to unit length, since nearness is the cosine, and scaled so that a typical number is about 1, where
float8 is finest. Searching casts back: the small types save memory, not time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.errors import ConfigError

FLOATS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
DTYPES = (*FLOATS, "int8", "binary")
WIDEST = 4.0  # in int8, numbers of this size and above are the largest; a typical one is 1
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Codec:
    """A projection fitted to keys, and the type they are kept in."""

    mean: Float[Tensor, "H"]
    components: Float[Tensor, "H K"]
    dtype: str

    @classmethod
    def fit(cls, vectors: Float[Tensor, "n H"], dims: int, dtype: str) -> Codec:
        """The `dims` directions in which `vectors` vary most."""
        if dtype not in DTYPES:
            raise ConfigError(
                f"keys of type {dtype} were asked for.",
                f"types are {', '.join(DTYPES)}.",
                "pass float8_e4m3, say.",
            )
        width = vectors.shape[-1]
        if not 1 <= dims <= width:
            raise ConfigError(
                f"keys of {dims} dimensions were asked for.",
                f"the target's hidden states have {width}.",
                f"pass a number between 1 and {width}.",
            )
        vectors = vectors.double()
        mean = vectors.mean(0)
        centred = vectors - mean
        _, directions = torch.linalg.eigh(centred.T @ centred)  # smallest first
        components = directions.flip(1)[:, :dims]
        return cls(mean.float(), components.float().contiguous(), dtype)

    @property
    def bytes_per_key(self) -> int:
        dims = self.components.shape[1]
        if self.dtype == "binary":
            return (dims + 7) // 8
        return dims * (1 if self.dtype == "int8" else FLOATS[self.dtype].itemsize)

    def project(self, vectors: Float[Tensor, "n H"]) -> Float[Tensor, "n K"]:
        """Unit vectors in the reduced space."""
        reduced = (vectors.float() - self.mean) @ self.components
        unit: Tensor = torch.nn.functional.normalize(reduced, dim=-1)
        return unit

    def encode(self, vectors: Float[Tensor, "n H"]) -> Tensor:
        """Keys as bytes [n, bytes_per_key]."""
        scaled = self.project(vectors) * math.sqrt(self.components.shape[1])
        if self.dtype == "binary":
            return _packed(scaled > 0)
        if self.dtype == "int8":
            steps = (scaled * (127 / WIDEST)).round().clamp(-127, 127)
            return steps.to(torch.int8).view(torch.uint8)
        return scaled.to(FLOATS[self.dtype]).contiguous().view(torch.uint8)

    def decode(self, keys: Tensor) -> Float[Tensor, "n K"]:
        """Bytes as the numbers they stand for, up to one common factor."""
        if self.dtype == "binary":
            bits = (keys[:, :, None] & torch.tensor(_BITS, dtype=torch.uint8)) != 0
            dims = self.components.shape[1]
            signs: Tensor = bits.flatten(1)[:, :dims].float() * 2 - 1
            return signs
        if self.dtype == "int8":
            return keys.view(torch.int8).float()
        return keys.view(FLOATS[self.dtype]).float()


def _packed(bits: Tensor) -> Tensor:
    """Eight truth values to a byte."""
    missing = -bits.shape[1] % 8
    padded = torch.nn.functional.pad(bits, (0, missing)).view(len(bits), -1, 8)
    return (padded * torch.tensor(_BITS, dtype=torch.uint8)).sum(-1).to(torch.uint8)
