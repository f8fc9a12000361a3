"""What the layers of a model would have said, and what is kept of a prompt to ask them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shadow:
    """The token each layer would have said at each place, and how sure it was."""

    tokens: Int[Tensor, "n L"]
    sure: Float[Tensor, "n L"]  # probability of that token, before any sampling option


@dataclass(frozen=True, slots=True)
class Watched:
    """Hidden states to keep of the last tokens of every prompt."""

    taps: tuple[int, ...]
    last: int
