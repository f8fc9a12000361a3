"""Stochastic beam search with a draft model: RSD-S (arXiv 2402.14160, after arXiv 1903.06059).

The papers perturb the log-probability of every path with Gumbel noise, top-down, and keep the W
best paths of each level. Perturbed values are arrival times in disguise: exp(-G) of a path is when
an independent stream of whole paths, drawn from the draft's law, brings that path first. The kept
paths of a level are therefore the first W different ones that such a stream brings, in their
order, and the stream itself can be drawn step by step: with the paths of one level known, the next
path of the level below is either a further child of a path that has been met, or the first child
of the next path to be met, with chances in the ratio of the probabilities that are left:

    q(s) (1 - q(children of s met so far | s))   and   1 - sum of q(s) over the paths s met so far.

So no noise has to be drawn, stored or inverted, and every choice is a coin that an audit can turn.

Which node gets the next child depends on earlier draws only, and that child is the next draw
without replacement at its node. This is why the recursive rule for distinct siblings, with the
node's own q renormalised after each rejection, stays exact although the number of siblings is
random: q needs no correction for the beam's choice.

A greedy draft (arXiv 2502.18779) has no stream: plain beam search says how many of the W likeliest
paths go through each node, and of so many children all but the last are the likeliest tokens; the
last is drawn from the others. The number follows from laws of nodes drawn before, so the rules for
such children stay exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.contract import DraftModel
from foretoken.drafters.growers.levels import (
    LevelGrowth,
    Levels,
    best_and_drawn,
    drawn,
    likeliest,
)
from foretoken.errors import ConfigError, check_values
from foretoken.trees.levels import cut_beam
from foretoken.types import Budget, Draw
from foretoken.warp.residual import without


class BeamGrowth(LevelGrowth):
    """One row's tree: all paths that were ever in its beam."""

    def spawn(self, laws: dict[int, Tensor]) -> None:
        if self.greedy:
            self.beam = best_paths(self, laws)
        elif self.kind is Draw.MIXED:
            self.beam = best_but_one(self, laws)
        else:
            self.beam = first_arrivals(self, laws)


class StochasticBeam(Levels):
    """A beam of different paths; the tree is all that was ever in it."""

    growth = BeamGrowth
    traits = drawn(Draw.DISTINCT)

    WIDTH, DEPTH = 4, 4  # where none was told

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        width: int | None = None  # paths kept per level; None: 4, or what the budget has
        greedy_draft: bool = False  # siblings are the likeliest tokens but one, which is drawn

    def __init__(self, model: DraftModel, config: Config | None = None) -> None:
        self.config = config or self.Config()
        super().__init__(model, Draw.MIXED if self.config.greedy_draft else Draw.DISTINCT)
        self.width = self.WIDTH if self.config.width is None else self.config.width
        check_values(self, ("width", self.width >= 1, "1 path per level or more"))

    def fitting(self, depth: int | None, nodes: int | None) -> Budget:
        depth = self.DEPTH if depth is None else depth
        whole = self.width * depth
        if nodes is not None and self.config.width is not None and whole > nodes > 0:
            raise ConfigError(
                f"width={self.width} was asked for with depth={depth} and nodes={nodes}.",
                f"that beam has {self.width} x {depth} = {whole} nodes.",
                f"pass nodes={whole} or leave nodes out, or narrow the beam.",
            )
        return Budget(depth, whole if nodes is None else nodes)

    def levels(self, depth: int, nodes: int) -> tuple[int, ...]:
        return cut_beam(self.width, depth, nodes)


def first_arrivals(growth: LevelGrowth, laws: dict[int, Tensor]) -> list[int]:
    """The next beam: the first `width` different paths of the stream, in order of arrival.

    A path that ended (an end token, or nothing may follow) arrives as itself.
    """
    coins = growth.row.coins
    beam, mass, met = growth.beam, growth.mass, 0
    arrived: list[int] = []
    parents: list[int] = []  # met nodes with children left, and those in `left`
    left: list[tuple[Tensor, float]] = []  # the law without the children met, and what they left
    while len(arrived) < growth.width:
        unmet = beam[met:]
        fresh = max(1.0 - sum(mass[s] for s in beam[:met]), sum(mass[s] for s in unmet))
        chances = [fresh if unmet else 0.0]
        chances += [mass[s] * share for s, (_, share) in zip(parents, left, strict=True)]
        choice = _choose(chances, growth)
        if choice is None:
            break
        if choice == 0:
            node, met = unmet[0], met + 1
            if node not in laws:
                arrived.append(node)
                continue
            law, share = laws[node], 1.0
            growth.laws[node] = law
        else:
            node = parents.pop(choice - 1)
            law, share = left.pop(choice - 1)
        token = coins.draw(law)
        chance = float(law[token])
        arrived.append(growth.add(token, node, share * chance))
        rest = without(law, token)
        if rest is not None:
            parents.append(node)
            left.append((rest, share * (1.0 - chance)))
    return arrived


def _choose(chances: list[float], growth: LevelGrowth) -> int | None:
    """An index drawn in the ratio of `chances`; no coin where only one is possible."""
    possible = [i for i, chance in enumerate(chances) if chance > 0.0]
    if len(possible) <= 1:
        return possible[0] if possible else None
    law = torch.tensor(chances, dtype=torch.float64)
    return growth.row.coins.draw(law / law.sum())


def best_paths(growth: LevelGrowth, laws: dict[int, Tensor]) -> list[int]:
    """Plain beam search: the `width` likeliest paths, ended ones among them."""
    return [
        node if token is None else growth.add(token, node, float(laws[node][token]))
        for node, token in likeliest_paths(growth, laws)
    ]


def best_but_one(growth: LevelGrowth, laws: dict[int, Tensor]) -> list[int]:
    """As many children for each node as plain beam search keeps there, the last of them drawn."""
    paths = likeliest_paths(growth, laws)
    beam = [node for node, token in paths if token is None]
    for node, count in Counter(node for node, token in paths if token is not None).items():
        children, growth.laws[node] = best_and_drawn(laws[node], count, growth.row.coins)
        beam += [growth.add(token, node, float(laws[node][token])) for token in children]
    return beam


def likeliest_paths(growth: LevelGrowth, laws: dict[int, Tensor]) -> list[tuple[int, int | None]]:
    """The `width` likeliest pairs of a node of the beam and a token after it, best first.

    A path that ended is its node and no token.
    """
    offers: list[tuple[float, int, int | None]] = []
    for node in growth.beam:
        if node not in laws:
            offers.append((growth.mass[node], node, None))
            continue
        law = laws[node]
        for token in likeliest(law, growth.width):
            offers.append((growth.mass[node] * float(law[token]), node, token))
    offers.sort(key=lambda offer: -offer[0])
    return [(node, token) for _, node, token in offers[: growth.width]]
