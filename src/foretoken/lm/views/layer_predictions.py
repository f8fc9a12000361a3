"""What the layers of a model would have said, read from hidden states by the norm and the head."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerPredictions:
    """The token each layer would have said at each place, and how sure it was."""

    tokens: Int[Tensor, "n L"]
    sure: Float[Tensor, "n L"]  # probability of that token, before any sampling option
