"""Rows of models whose scaling of positions follows the last position of a call (longrope)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foretoken.lm.runtime.packing import Feed, Memory, renewed_feed, tree_feed
from foretoken.trees.masks import depths
from foretoken.types import DecodeState, Scores, Taps


def advance_scaled(
    run: Callable[[list[Feed], Taps], list[Scores]],
    switch: int,
    memory: Memory,
    row: DecodeState,
    tokens: Sequence[int],
    parents: Sequence[int],
    taps: Taps,
) -> Scores:
    """Logits and tapped features of new nodes of a row.

    Nodes on both sides of the switch are scored in one call each, and the columns are always those
    that a forward over the row without a cache would have made.
    """
    root = len(row.tokens) - 1
    beyond = [root + depth >= switch for depth in depths(parents, memory.depths)]
    sides = sorted(set(beyond))
    parts = []
    for side in sides:
        if len(sides) == 1 and memory.far == side:
            missing = () if memory.tokens else row.tokens[memory.cached : -1]
            feed = tree_feed(memory, missing, tokens, parents)
        else:
            feed = renewed_feed(memory, row.tokens[:-1], tokens, parents, side, switch)
            if side != sides[-1]:
                feed.nodes = None  # they enter the tree with the second call
        parts += run([feed], taps)
        memory.far = side
    if len(parts) == 1:
        return parts[0]
    near, far = parts
    there = torch.tensor(beyond, device=near.logits.device)[:, None]
    logits = torch.where(there, far.logits, near.logits)
    if near.hidden is None or far.hidden is None:
        return Scores(logits)
    return Scores(logits, torch.where(there[..., None], far.hidden, near.hidden))
