"""Laws that no option shapes but the temperature."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from foretoken.native.laws import softmax
from foretoken.types import Few


def law_of(said: Float[Tensor, "N V"] | Few, temperature: float = 1.0) -> Float[Tensor, "N V"]:
    """The softmax of what a forward said, over all tokens; of few logits the others are zero."""
    if isinstance(said, Few):
        return softmax(said.logits, temperature, said.tokens, said.width)
    return softmax(said, temperature)
