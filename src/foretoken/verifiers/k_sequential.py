"""k-sequential selection for independent drafts (SpecTr, arXiv 2310.15141, k-SEQ).

At a node with k children drawn independently from q, every child gets the same try: accept x with
probability min(1, p(x) / (rho q(x))). One try succeeds with probability beta(rho), all of them fail
with (1 - beta)^k, and what p is still owed then follows

    p - min(q, p / rho) (1 - (1 - beta)^k) / beta.

That is a law only if it is nowhere negative, for which 1 - (1 - beta)^k <= rho beta is enough; the
smallest such rho in [1, k] is taken. k counts drafts, not different tokens. Several drafts with the
same text are one place: the tries at it are the children of all of them, and whatever token comes
out, the drafts that carry it live on (Algorithm 2 of the paper, for trees of any shape).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.coins import Coins
from foretoken.types import Draft, Draw, Laws, Verdict
from foretoken.verifiers.point import ForDrawn, children_of, drawn_from

HALVINGS = 40  # of the bracket around rho


class KSequential(ForDrawn):
    """Equal tries for all drafts that agree with the text so far."""

    exact_for = frozenset({Draw.POINT, Draw.IID})

    def judge(self, draft: Draft, laws: Laws, coins: Coins) -> Verdict:
        tokens, children = draft.tree.tokens, children_of(draft)
        node = 0
        while children[node]:
            q = drawn_from(draft, children[node][0])
            drawn = [tokens[child] for child in children[node]]
            token = self.select(drawn, laws[node], q, coins)
            if token not in drawn:
                return Verdict(tuple(draft.tree.path(node)), token)
            node = children[node][drawn.index(token)]  # the first of them has all the children
        return Verdict(tuple(draft.tree.path(node)), laws.draw(node, coins))

    def select(self, drawn: list[int], p: Tensor, q: Tensor, coins: Coins) -> int:
        """The token that follows, distributed as p, from tokens drawn as q."""
        rho = division_factor(p, q, len(drawn))
        for token in drawn:
            if coins.flip(float(p[token]) / (rho * float(q[token]))):
                return token
        return coins.draw(owed(p, q, rho, len(drawn)))


def one_try(p: Tensor, q: Tensor, rho: float) -> float:
    """beta(rho): the chance that one draw from q is accepted."""
    return float(torch.minimum(q, p / rho).sum())


def any_try(beta: float, k: int) -> float:
    """The chance that one of k tries is accepted."""
    return 1.0 - (1.0 - min(beta, 1.0)) ** k


def division_factor(p: Tensor, q: Tensor, k: int) -> float:
    """The smallest rho in [1, k] that leaves nothing negative, from above.

    Between two neighbours among the ratios p/q, beta is a + b / rho: one sort finds the pair of
    them, and the bisection inside needs no further look at the laws.
    """
    p, q = p.double(), q.double()
    low, high = 1.0, float(k)
    if k == 1 or enough(low, one_try(p, q, low), k):
        return low
    possible = q > 0.0
    p, q = p[possible], q[possible]
    ratios, order = (p / q).sort()
    whole = p[order].cumsum(0)  # of the tokens up to here, p
    part = q[order].sum() - q[order].cumsum(0)  # of those beyond, q
    inside = (ratios > low) & (ratios < high)
    at = ratios[inside]
    places, betas = at.tolist(), (whole[inside] / at + part[inside]).tolist()
    first = bisect_left(range(len(places)), True, key=lambda i: enough(places[i], betas[i], k))
    below = int((ratios <= low).sum()) + first - 1  # the last ratio under the segment
    a, b = (float(part[below]), float(whole[below])) if below >= 0 else (float(q.sum()), 0.0)
    low = places[first - 1] if first > 0 else low
    high = places[first] if first < len(places) else high
    return halved(low, high, lambda rho: enough(rho, a + b / rho, k))


def by_bisection(p: Tensor, q: Tensor, k: int) -> float:
    """The same with a look at the whole laws for every halving: the reference."""
    p, q = p.double(), q.double()
    if enough(1.0, one_try(p, q, 1.0), k):
        return 1.0
    return halved(1.0, float(k), lambda rho: enough(rho, one_try(p, q, rho), k))


def enough(rho: float, beta: float, k: int) -> bool:
    """Whether rho leaves nothing negative; once true, it stays true for every larger rho.

    beta is the sum of min(q, p / rho), so it never rises with rho, and any_try falls with it; rho
    beta is the sum of min(rho q, p), which never falls.
    """
    return any_try(beta, k) <= rho * beta


def halved(low: float, high: float, good: Callable[[float], bool]) -> float:
    """Where `good` begins, on the side where it holds: there the residual is a law."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def owed(p: Tensor, q: Tensor, rho: float, k: int) -> Tensor:
    """What follows k failed tries; p itself where failing has probability zero."""
    p, q = p.double(), q.double()
    tried = torch.minimum(q, p / rho)
    beta = float(tried.sum())
    if beta <= 0.0:
        return p
    rest = (p - tried * (any_try(beta, k) / beta)).clamp_(min=0.0)
    mass = float(rest.sum())
    return rest / mass if mass > 0.0 else p
