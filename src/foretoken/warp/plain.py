"""Laws that no option shapes but the temperature."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from foretoken.native.best_columns import best_columns
from foretoken.native.laws import softmax
from foretoken.types import Few


def law_of(said: Float[Tensor, "N V"] | Few, temperature: float = 1.0) -> Float[Tensor, "N V"]:
    """The softmax of what a forward said, over all tokens; of few logits the others are zero."""
    if isinstance(said, Few):
        return softmax(said.logits, temperature, said.tokens, said.width)
    return softmax(said, temperature)


def likeliest_of(
    said: Float[Tensor, "N V"] | Few, count: int, temperature: float = 1.0
) -> tuple[list[list[int]], list[list[float]]]:
    """The likeliest tokens of every row, best first, and their probabilities in its law."""
    if isinstance(said, Few):
        return best_columns(said.logits, count, temperature, said.tokens)
    return best_columns(said, count, temperature)
