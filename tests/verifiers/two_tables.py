"""A target and a draft whose whole truth is known."""

from __future__ import annotations

import itertools
import math

from foretoken.lm.table import TableLM


def pair(vocab: int, seed: int, holes: bool = False) -> tuple[TableLM, TableLM]:
    """Target and draft tables; with `holes`, tokens that one of them thinks impossible."""
    target, guess = TableLM.random(vocab, seed=seed), TableLM.random(vocab, seed=seed + 1)
    if holes:
        for at in itertools.product(range(vocab), repeat=2):
            target.logits[(*at, sum(at) % vocab)] = -math.inf
            guess.logits[(*at, (at[0] + 2 * at[1] + 1) % vocab)] = -math.inf
    return target, guess
