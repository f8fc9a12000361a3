"""Block verification of chains (Sun et al., arXiv 2403.10444, Algorithm 1).

P[i] is the chance that the prefix of i drafted tokens can be kept in total, h[i] the part of it
that longer prefixes have not already kept. One coin per prefix, longest first; the first success
decides. On failure the correction comes from relu(P[i] p - q), which is why the block rule keeps
more than the token rule and changes nothing in the law.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.coins import Coins
from foretoken.types import Draft, Draw, Laws, Shape, Verdict
from foretoken.verifiers.point import ForDrawn, drawn_from
from foretoken.warp.residual import chances, left_over, owed


class Block(ForDrawn):
    """Accept the longest prefix whose joint law can be repaired."""

    exact_for = frozenset({Draw.POINT, Draw.IID})
    shape = Shape.CHAIN

    def judge(self, draft: Draft, laws: Laws, coins: Coins) -> Verdict:
        assert draft.tree.is_chain, "block verification reads chains only"
        kept, law = self.settle(draft, laws, coins)
        return Verdict(tuple(range(1, kept + 1)), coins.draw(law))

    def settle(self, draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
        """How many drafted tokens stay, and the law of the token that follows them."""
        return all_at_once(draft, laws, coins)


def all_at_once(draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
    """Algorithm 1 over all rows: at most three reads from the device, whatever their number."""
    drafted = len(draft.tree) - 1
    tokens = draft.tree.tokens[1:]
    p = [laws[i] for i in range(drafted)]  # [V] each; the one behind i kept tokens
    q = [drawn_from(draft, i) for i in range(1, drafted + 1)]
    keep = keepable(chances(p, tokens), chances(q, tokens), sure(p[0]))
    drafted = len(keep) - 1  # fewer where a law is NaN
    if coins.flip(keep[drafted]):
        return drafted, laws[drafted]
    masses = owed(p[:drafted], q[:drafted], keep[:-1])
    kept = next((i for i in range(drafted - 1, 0, -1) if coins.flip(share(masses[i], keep[i]))), 0)
    return kept, left_over(p[kept], q[kept], keep[kept], masses[kept])


def one_by_one(draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
    """Algorithm 1 as it is printed: the reference for `all_at_once`."""
    drafted = len(draft.tree) - 1
    tokens = draft.tree.tokens[1:]
    p = [laws[i] for i in range(drafted + 1)]
    q = [drawn_from(draft, i) for i in range(1, drafted + 1)]
    keep = [1.0]
    for i, token in enumerate(tokens):
        ratio = float(p[i][token]) / max(float(q[i][token]), 1e-300)
        if ratio != ratio:  # NaN
            drafted = i
            break
        keep.append(min(1.0, keep[-1] * ratio))
        if keep[-1] >= sure(p[0]):
            keep[-1] = 1.0
    for kept in range(drafted, -1, -1):
        if kept == drafted:
            if coins.flip(keep[kept]):
                return kept, p[kept]
            continue
        rest = (keep[kept] * p[kept] - q[kept]).clamp(min=0.0)
        mass = float(rest.sum())
        if kept == 0 or coins.flip(share(mass, keep[kept])):
            return kept, repaired(rest, mass, p[kept])
    raise AssertionError("the empty prefix always stands")


def keepable(target: list[float], guess: list[float], certain: float) -> list[float]:
    """P[0..G]: the running product of p/q, clipped to one at every step.

    It ends before a token whose law is NaN, as if no more had been drafted: nothing is accepted by
    such a law, and a text that gets there is refused by drawing from it.
    """
    keep = [1.0]
    for p, q in zip(target, guess, strict=True):
        now = keep[-1] * p / max(q, 1e-300)
        if now != now:
            break
        keep.append(1.0 if now >= certain else now)
    return keep


def share(mass: float, keep: float) -> float:
    """h = S / (S + 1 - P): the part of P that longer prefixes left over."""
    return 1.0 if keep >= 1.0 else mass / (mass + 1.0 - keep)


def repaired(rest: Tensor, mass: float, p: Tensor) -> Tensor:
    """The correction's law; without mass p equals q there, and p itself is right."""
    return rest / mass if mass > 0.0 else p


def sure(p: Tensor) -> float:
    """P from here on counts as one: below rounding, 1 - P means nothing."""
    return 1.0 - 1e-12 if p.dtype == torch.float64 else 1.0 - 1e-6
