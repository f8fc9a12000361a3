"""What is left of a law once a candidate was rejected, or once tokens are taken out of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.native import laws


def residual(p: Float[Tensor, "V"], q: Float[Tensor, "V"]) -> Float[Tensor, "V"] | None:
    """norm(relu(p - q)): what the target still owes after a draw of q was rejected.

    None where nothing is owed: there q covers p, and no draw of it can be rejected.
    """
    mass = laws.owed(p, q)
    if mass is None:
        return _normalised((p - q).clamp_(min=0.0))
    return left_over(p, q, 1.0, mass) if mass > 0.0 else None


def owed(
    p: Sequence[Float[Tensor, "V"]], q: Sequence[Float[Tensor, "V"]], weights: Sequence[float]
) -> list[float]:
    """The sums of relu(weight p - q), pair by pair; one read from a device, however many."""
    masses = [laws.owed(*each) for each in zip(p, q, weights, strict=True)]
    found = [mass for mass in masses if mass is not None]
    if len(found) == len(masses):
        return found
    whole = torch.stack(list(p))
    scale = torch.tensor(weights, dtype=whole.dtype, device=whole.device)[:, None]
    sums: list[float] = (
        torch.addcmul(-torch.stack(list(q)), whole, scale).clamp_(0.0).sum(-1).tolist()
    )
    return sums


def left_over(
    p: Float[Tensor, "V"], q: Float[Tensor, "V"], weight: float, mass: float
) -> Float[Tensor, "V"]:
    """relu(weight p - q) over its sum `mass`; p itself where that is nothing: at weight 1 both are
    equal then, and at less nobody asks."""
    if not mass > 0.0:
        return p
    law = laws.left_over(p, q, weight, mass)
    return (weight * p - q).clamp_(min=0.0) / mass if law is None else law


def chances(found: Sequence[Float[Tensor, "V"]], tokens: Sequence[int]) -> list[float]:
    """Of each law the chance of a token; one read from a device, however many."""
    if found[0].is_cpu:
        return [float(law[token]) for law, token in zip(found, tokens, strict=True)]
    at = torch.tensor(tokens, device=found[0].device)[:, None]
    together: list[float] = torch.stack(list(found)).gather(1, at)[:, 0].tolist()
    return together


def without(law: Float[Tensor, "V"], tokens: int | list[int]) -> Float[Tensor, "V"] | None:
    """`law` given that it is none of `tokens`; None where nothing else is possible."""
    found = laws.without(law, [tokens] if isinstance(tokens, int) else tokens)
    if found is not None:
        rest, mass = found
        return rest if mass > 0.0 else None
    rest = law.clone()
    rest[tokens] = 0.0
    return _normalised(rest)


def _normalised(rest: Tensor) -> Tensor | None:
    mass = rest.sum()
    return rest / mass if float(mass) > 0.0 else None
