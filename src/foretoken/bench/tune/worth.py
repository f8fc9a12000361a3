"""What a trained draft would be worth: measured costs, the target's certainty, and acceptance.

With acceptance a (each guess stands with this chance, whatever stood before), a chain of k guesses
brings (1 - a^(k+1)) / (1 - a) tokens. It costs a forward over k + 1 nodes and k forwards of the
draft. The best k is taken. The loop's own time is left out, and so is that real drafts guess worse
the deeper they go: the table says what can be hoped for, not what will be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.coins import SeededCoins
from foretoken.contract import LanguageModel
from foretoken.controllers.step_costs import CostCurve, convex
from foretoken.row import make_row
from foretoken.types import Draft, Draw, SamplingParams, TokenTree

COSTS = (0.03, 0.05, 0.10)  # of a draft's forward, in forwards of the target
RATES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # acceptance
DEEPEST = 16
SURE, UNSURE = 0.9, 0.5  # top probabilities that tell easy places from open ones
PIECE = 32  # nodes per forward that reads the law of a text
Cost = Callable[[int], float]  # nodes scored -> forwards of one node


def worth(
    scoring: Mapping[str, Any], certainty: Mapping[str, float] | None, best: float
) -> dict[str, Any]:
    """The table, what acceptance pays at all, and what beats the `best` measured speed-up."""
    cost = scoring_cost(scoring)
    likely = certainty["top"] if certainty else None
    return {
        "rates": list(RATES),
        "costs": [
            {
                "cost": share,
                "speedup": [round(speedup(rate, share, cost)[0], 3) for rate in RATES],
                "depth": [speedup(rate, share, cost)[1] for rate in RATES],
                "pays_from": needed(1.0, share, cost),
                "beats_best_from": needed(max(best, 1.0), share, cost),
                "at_certainty": None if likely is None else speedup(likely, share, cost)[0],
            }
            for share in COSTS
        ],
        "certainty": None if certainty is None else dict(certainty),
        "best": best,
    }


def scoring_cost(scoring: Mapping[str, Any]) -> Cost:
    """What scoring n nodes costs, between the sizes that were measured."""
    return CostCurve(convex(dict(zip(scoring["nodes"], scoring["ratio"], strict=True)))).at


def speedup(acceptance: float, share: float, cost: Cost) -> tuple[float, int]:
    """The speed-up of the best depth, and that depth; plain decoding is depth 0."""
    tokens, best, deep = 1.0, 1.0, 0
    for depth in range(1, DEEPEST + 1):
        tokens += acceptance**depth
        found = tokens / (cost(depth + 1) / cost(1) + share * depth)
        if found > best:
            best, deep = found, depth
    return best, deep


def needed(goal: float, share: float, cost: Cost) -> float | None:
    """The least acceptance that is faster than `goal`; None where not even certainty is."""
    low, high = 0.0, 1.0
    if speedup(high, share, cost)[0] <= goal:
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, share, cost)[0] > goal else (middle, high)
    return round(high, 3)


@torch.inference_mode()
def certainty(
    lm: LanguageModel,
    texts: Iterable[tuple[Sequence[int], Sequence[int]]],
    params: SamplingParams,
) -> dict[str, float] | None:
    """How sure the target was of its own texts (prompt, answer), means over their tokens.

    The law is that of the options that they were written with; of greedy text the one before them.
    top: the probability of its likeliest token, which is how often a draft that knew the law would
    guess a token drawn from it; same: that two tokens drawn from the law are equal; entropy in
    nats; sure and unsure: shares of tokens with a top probability above SURE, below UNSURE.
    """
    found: list[tuple[float, float, float]] = []
    for prompt, answer in texts:
        found += laws_of(lm, prompt, answer, params)
    if not found:
        return None
    tops = [top for top, _, _ in found]
    return {
        "tokens": len(found),
        "top": fmean(tops),
        "same": fmean(same for _, same, _ in found),
        "entropy": fmean(entropy for _, _, entropy in found),
        "sure": fmean(top > SURE for top in tops),
        "unsure": fmean(top < UNSURE for top in tops),
    }


def laws_of(
    lm: LanguageModel, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams
) -> list[tuple[float, float, float]]:
    """Top probability, sum of squares and entropy of the law that each token was chosen from."""
    found: list[tuple[float, float, float]] = []
    params = replace(params, max_new_tokens=10**6, eos=frozenset())
    row = make_row(prompt, params, SeededCoins(0), lm.vocab_size)
    try:
        lm.prefill([row])
        for start in range(0, len(answer), PIECE):
            piece = answer[start : start + PIECE]
            nodes = (row.tokens[-1], *piece[:-1])
            tree = TokenTree(nodes, tuple(range(-1, len(nodes) - 1)))
            logits = lm.score([row], [Draft(tree, Draw.POINT)])[0].logits
            if row.warp.greedy:
                found += told_by(torch.softmax(logits.double(), dim=-1))
            else:
                laws = row.warp.laws(row.tokens, tree, logits)
                found += told_by(torch.stack([laws[node] for node in range(len(tree))]).double())
            lm.commit([row], [tuple(range(1, len(nodes)))])
            row.tokens.extend(piece)
    finally:
        lm.free([row])
    return found


def told_by(laws: Float[Tensor, "N V"]) -> list[tuple[float, float, float]]:
    """The same of a few laws."""
    each = laws.amax(dim=-1), laws.square().sum(dim=-1), torch.special.entr(laws).sum(dim=-1)
    return list(zip(*(values.tolist() for values in each), strict=True))
