"""How often each rule accepts at one node, in closed form: no coin is flipped.

Acceptance is the chance that the token a rule returns is one of the k candidates. The rules are
those of `verifiers`; enumeration of the real ones is the test of these formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.trees.mixed import best_and_rest
from foretoken.types import Draw

Acceptance = Callable[[Tensor, Tensor, int], float]
HALVINGS = 60  # of the bracket around the division factor


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, the candidates it is for, and its acceptance with k of them."""

    name: str
    draw: Draw
    accepts: Acceptance


def single(p: Float[Tensor, "V"], q: Float[Tensor, "V"]) -> float:
    """One candidate: 1 - TV(p, q), and nothing does better."""
    return float(torch.minimum(p, q).sum())


def recursive_independent(p: Float[Tensor, "V"], q: Float[Tensor, "V"], k: int) -> float:
    """Recursive rejection of k independent draws: the residual meets the same q again."""
    missed = 1.0
    for _ in range(k):
        missed *= 1.0 - single(p, q)
        rest = (p - q).clamp_(min=0.0)
        mass = float(rest.sum())
        if mass <= 0.0:
            return 1.0
        p = rest / mass
    return 1.0 - missed


def recursive_distinct(p: Float[Tensor, "V"], q: Float[Tensor, "V"], k: int) -> float:
    """Recursive rejection of k draws without replacement, over all orders of rejected ones."""
    accepted = 0.0
    weight, p, q = q.new_ones(1), p[None], q[None]  # [orders], [orders, V], [orders, V]
    for _ in range(k):
        accepted += float(weight @ torch.minimum(p, q).sum(-1))
        rejected = (q - p).clamp_(min=0.0)
        at, token = rejected.nonzero(as_tuple=True)
        rest, left = (p - q).clamp_(min=0.0)[at], q[at].scatter(1, token[:, None], 0.0)
        weight = weight[at] * rejected[at, token]
        sound = (rest.sum(-1) > 0.0) & (left.sum(-1) > 0.0)  # else no further candidate is tried
        weight, rest, left = weight[sound], rest[sound], left[sound]
        p, q = rest / rest.sum(-1, keepdim=True), left / left.sum(-1, keepdim=True)
    return accepted


def k_sequential(p: Float[Tensor, "V"], q: Float[Tensor, "V"], k: int) -> float:
    """k equal tries at min(q, p / rho), with the smallest rho that leaves a law to correct with."""

    def one(rho: float) -> float:
        return float(torch.minimum(q, p / rho).sum())

    def some(rho: float) -> float:
        return 1.0 - (1.0 - min(one(rho), 1.0)) ** k

    low, high = 1.0, float(k)
    if some(low) <= low * one(low):
        return some(low)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if some(middle) <= middle * one(middle) else (middle, high)
    return some(high)


def greedy(p: Float[Tensor, "V"], q: Float[Tensor, "V"], k: int) -> float:
    """The k - 1 likeliest tokens fixed, one drawn from the rest: p(fixed) + sum min(p, rest)."""
    best, rest = best_and_rest(q, k - 1)
    return float(p[best].sum() + torch.minimum(p, rest).sum())


RULES = (
    Rule("recursive", Draw.IID, recursive_independent),
    Rule("k-sequential", Draw.IID, k_sequential),
    Rule("recursive", Draw.DISTINCT, recursive_distinct),
    Rule("greedy", Draw.MIXED, greedy),
)
