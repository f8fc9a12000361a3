"""What is left of a law once a candidate was rejected, or once tokens are taken out of it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def residual(p: Float[Tensor, "V"], q: Float[Tensor, "V"]) -> Float[Tensor, "V"] | None:
    """norm(relu(p - q)): what the target still owes after a draw of q was rejected.

    None where nothing is owed: there q covers p, and no draw of it can be rejected.
    """
    return _normalised((p - q).clamp_(min=0.0))


def without(law: Float[Tensor, "V"], tokens: int | list[int]) -> Float[Tensor, "V"] | None:
    """`law` given that it is none of `tokens`; None where nothing else is possible."""
    rest = law.clone()
    rest[tokens] = 0.0
    return _normalised(rest)


def _normalised(rest: Tensor) -> Tensor | None:
    mass = rest.sum()
    return rest / mass if float(mass) > 0.0 else None
