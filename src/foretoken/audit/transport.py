"""The best acceptance that any rule can reach with given candidates, as a transport problem.

A rule sees a set of candidates, drawn in a known manner, and returns a token that follows p; it
accepts when that token is a candidate. The most it can accept is the largest flow from the sets to
their tokens, where a set sends its chance at most and a token takes p at most (SpecTr, arXiv
2310.15141). By duality it is the smallest cut

    min over sets of tokens A of  p(A) + 1 - P(all candidates are in A),

and the smallest one is among the sets of the tokens with the least p / q (Hu et al., arXiv
2502.18779). `by_flow` solves the linear programme, `by_cut` takes the minimum: two ways to one
number, the first for small vocabularies only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.trees.mixed import best_and_rest
from foretoken.types import Draw

try:
    from scipy.optimize import linprog
    from scipy.sparse import csr_array
except ImportError as problem:
    raise ConfigError(
        "the best possible acceptance was asked for.",
        "its linear programme is solved by scipy, which is not installed.",
        "pip install 'foretoken[audit]'.",
    ) from problem

TIGHT = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
Sets = Mapping[tuple[int, ...], float]  # candidates, sorted and without repetition: their chance


def candidate_sets(q: Float[Tensor, "V"], k: int, draw: Draw) -> dict[tuple[int, ...], float]:
    """Every set that k candidates of one node can be, with its probability."""
    sets: dict[tuple[int, ...], float] = {}
    for drawn, chance in draws_of(q.double().tolist(), k, draw):
        key = tuple(sorted(set(drawn)))
        sets[key] = sets.get(key, 0.0) + chance
    return sets


def draws_of(q: list[float], k: int, draw: Draw) -> Iterator[tuple[tuple[int, ...], float]]:
    """Candidates with their chance; independent ones sorted, distinct ones in the order drawn."""
    tokens = [token for token, chance in enumerate(q) if chance > 0.0]
    if draw is Draw.IID:
        for drawn in itertools.combinations_with_replacement(tokens, k):
            counts = [drawn.count(token) for token in set(drawn)]
            orders = math.factorial(k) / math.prod(map(math.factorial, counts))
            yield drawn, orders * math.prod(q[token] for token in drawn)
    elif draw is Draw.DISTINCT:
        for drawn in itertools.permutations(tokens, min(k, len(tokens))):
            chance, left = 1.0, sum(q)
            for token in drawn:
                chance, left = chance * q[token] / left, left - q[token]
            yield drawn, chance
    else:
        best, rest = best_and_rest(torch.tensor(q, dtype=torch.float64), k - 1)
        chances = rest.tolist()
        if not any(chances):
            yield tuple(best), 1.0
        for token, chance in enumerate(chances):
            if chance > 0.0:
                yield (*best, token), chance


def by_flow(p: Float[Tensor, "V"], sets: Sets) -> float:
    """The largest flow from candidate sets to their tokens, by linear programming."""
    edges = [(row, token) for row, tokens in enumerate(sets) for token in tokens]
    sources = np.array([row for row, _ in edges])
    sinks = np.array([len(sets) + token for _, token in edges])
    columns = np.arange(len(edges))
    limits = np.concatenate([np.array(list(sets.values())), p.double().numpy()])
    sums = csr_array(
        (
            np.ones(2 * len(edges)),
            (np.concatenate([sources, sinks]), np.concatenate([columns, columns])),
        ),
        shape=(len(limits), len(edges)),
    )
    found = linprog(-np.ones(len(edges)), A_ub=sums, b_ub=limits, bounds=(0.0, None), options=TIGHT)
    assert found.success, found.message
    return float(-found.fun)


def by_cut(p: Float[Tensor, "V"], q: Float[Tensor, "V"], k: int, draw: Draw) -> float:
    """The smallest cut over the thresholds of p / q; exact for independent and distinct draws."""
    p, q = p.double(), q.double()
    order = (p / q.clamp_min(1e-300)).argsort()
    below = p[order].cumsum(0)  # [V]; p of the tokens up to each threshold
    inside = all_inside(q[order], k, draw)  # [V]
    return min(1.0, float((below + 1.0 - inside).min()))


def all_inside(q: Float[Tensor, "V"], k: int, draw: Draw) -> Float[Tensor, "V"]:
    """The chance that k candidates are all among the first tokens, for each number of them."""
    if draw is Draw.IID:
        return q.cumsum(0).clamp(max=1.0) ** k
    assert draw is Draw.DISTINCT, "mixed candidates reach their optimum: there is nothing to cut"
    k = min(k, int((q > 0.0).sum()))
    # All orders of the first k - 1 draws: their chance, what they leave of q, the last of them.
    chance, left, last = q.new_ones(1), q[None], torch.zeros(1, dtype=torch.long)
    for _ in range(k - 1):
        at, token = left.nonzero(as_tuple=True)
        chance = chance[at] * left[at, token] / left[at].sum(-1)
        left = left[at].scatter(1, token[:, None], 0.0)
        last = torch.maximum(last[at], token)
    share = chance / left.sum(-1)
    none = torch.zeros_like(q)
    drawn = none.index_add(0, last, share)  # by the threshold from which on they are all inside
    taken = none.index_add(0, last, share * (q.sum() - left.sum(-1)))
    return drawn.cumsum(0) * q.cumsum(0) - taken.cumsum(0)
