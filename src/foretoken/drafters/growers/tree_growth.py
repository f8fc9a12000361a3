"""What growers of trees share: a tree under way, and the laws that its candidates come from.

Above temperature 0 a law is the row's own warp of the draft model's logits. At temperature 0 that
would be a point mass: candidates are fixed there, and rank by the law before the temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.contract import StoppingRule
from foretoken.drafters.growers.grower import Growth
from foretoken.errors import ConfigError
from foretoken.types import DecodeState, Go, Level, Scores
from foretoken.warp import Warp


class TreeGrowth(Growth):
    """One row's tree under way; its lists run over its nodes, the root first."""

    def __init__(self, row: DecodeState) -> None:
        self.row, self.warp = row, ranking(row)
        self.greedy: bool = row.warp.greedy
        self.tokens = [row.tokens[-1]]
        self.parents = [-1]
        self.frontier = [0]  # nodes to be fed next
        self.places: dict[int, int] = {}  # of nodes that were fed, in the model's open tree
        self.level = 0

    def feed(self) -> tuple[Sequence[int], Sequence[int]]:
        places, parents, tokens = self.places, self.parents, self.tokens
        for node in self.frontier:
            places[node] = len(places)
        above = [places.get(parents[node], -1) for node in self.frontier]
        return [tokens[node] for node in self.frontier], above

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to `node`."""
        found: list[int] = []
        while node > 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def read(self, logits: Tensor) -> tuple[list[int], Tensor]:
        """The laws [n, V] after the nodes just fed; nodes that nothing may follow are left out."""
        if not self.warp.path_dependent:
            return self.frontier, self.warp.probabilities(self.warp.biased(logits))
        nodes, laws = [], []
        for node, scored in zip(self.frontier, logits, strict=True):
            try:
                laws.append(self.warp.law(self.row.tokens, scored, self.path(node)))
                nodes.append(node)
            except ConfigError:  # the options forbid everything here; the target may not come by
                continue
        return nodes, torch.stack(laws) if laws else logits[:0]

    def ask(
        self, stop: StoppingRule | None, nodes: Sequence[int], laws: Tensor, score: Scores
    ) -> Go:
        """What the stopping rule says about a level: to the law of its first branch, or of all."""
        if not nodes:
            return Go.STOP
        if stop is None:
            return Go.ON
        if not stop.branches:
            nodes, laws = nodes[:1], laws[:1]
        hidden = score.hidden
        if hidden is not None:
            hidden = hidden[[self.frontier.index(node) for node in nodes]]
        return stop.after(self.row, Level(laws, hidden))

    def fed(self, path: Sequence[int]) -> list[int] | None:
        places = self.places
        return [places[node] for node in path if node in places] if places else None


def ranking(row: DecodeState) -> Warp:
    """The options that a row's candidates are drawn under or, at temperature 0, ranked by."""
    if not row.warp.greedy:
        warp: Warp = row.warp
        return warp
    ranked: Warp | None = row.private.get(ranking)
    if ranked is None:
        params = replace(row.params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        row.private[ranking] = ranked = Warp(params, row.prompt_len, row.warp.vocab_size)
    ranked.device = row.warp.device
    ranked.follow(row.tokens)  # of a fork of the row, or of the row itself again
    return ranked
