"""One law over several texts at once: what beam sampling draws (text, token) pairs from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.warp import Warp, fit, impossible, nothing_left, point_mass
from foretoken.warp.best import best_tokens


@dataclass(frozen=True, slots=True)
class Joint:
    """The law of the next (text, token) pair and what it was made from."""

    law: Float[Tensor, "mV"]  # pair `i * V + token` is `token` after text i; sums to one
    # of each text's next token, behind penalties, bias, processors and grammar, before temperature
    # and cuts
    log_p: Float[Tensor, "m V"]


def joint_law(
    warp: Warp,
    tokens: Sequence[int],
    paths: Sequence[Sequence[int]],
    weights: Sequence[float],
    logits: Float[Tensor, "m V"],
) -> Joint:
    """Softmax of `weight + log p` over all pairs, with temperature and cuts applied to all at once.

    Text i is `tokens + paths[i]`; its weight is the log of its share among the texts. At
    temperature 0 the law is a point mass on the best pair.
    """
    if warp.path_dependent:
        warp.follow(tokens)
    scores = fit(warp._processed(tokens, paths, logits))
    log_p = scores.log_softmax(-1)
    dead = impossible(scores) if warp._forbids else []
    if len(dead) == len(scores):
        raise nothing_left(len(tokens) + min(len(path) for path in paths))
    if dead:
        log_p[dead] = -torch.inf
    flat = (log_p + log_p.new_tensor(weights)[:, None]).flatten()
    if warp.greedy:
        return Joint(point_mass(best_tokens(flat), flat), log_p)
    return Joint(warp.probabilities(flat), log_p)
