"""Several drafters of fixed candidates in one tree, under one node budget.

Every member proposes its own tree; equal paths merge. What a member says of a node's chance is
calibrated by how often it was right before, per member, depth and confidence; a node proposed by
several gets the largest of these chances, and the nodes worth most are kept. Candidates stay fixed,
so the rule is exact whatever is merged (`methods/beyond/cascades.md`, algorithm 4; no paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretoken.contract import Drafter, Guided, StoppingRule
from foretoken.drafters.parts.chances import affordable, trials
from foretoken.drafters.parts.members import Combination
from foretoken.errors import ConfigError, PairingError
from foretoken.trees.build import Trie
from foretoken.trees.worth import Calibration
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Memory,
    Rows,
    Shape,
    Step,
    TokenTree,
    Traits,
)

UNSAID = 0.5  # chance of a child, from a member that names none; experience corrects it
LEVELS = 4  # depths told apart; deeper ones count as the last


def merges(drafter: Drafter) -> bool:
    """Whether its candidates may be chosen again, and nothing it holds follows which ones are."""
    traits = drafter.traits
    return traits.fixed and not traits.taps and not isinstance(drafter, Guided)


class Fusion(Combination):
    """One tree from many."""

    traits = Traits(shape=Shape.TREE, memory=Memory.ENGINE, prices=True)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        # methods to merge in place of the row's own; whoever builds the drafter reads this
        sources: tuple[str, ...] | None = None

    def __init__(self, *members: Drafter, config: Config | None = None) -> None:
        self.config = config or self.Config()
        if not members:
            raise ConfigError(
                "a fusion of no sources was asked for.",
                "it merges the drafts of one or more methods.",
                "pass for instance sources=['suffix', 'token-recycling'].",
            )
        for member in members:
            if not merges(member):
                raise PairingError(
                    f"{type(member).__name__} was asked to be merged with other drafters.",
                    "only fixed (point) candidates can be chosen again after they were made, and "
                    "only those of drafters without a draft model that read no hidden states.",
                    "merge look-up methods: prompt-lookup, suffix, token-recycling, lookahead.",
                )
        super().__init__(*members)
        if len(members) > 1:
            self.traits = replace(self.traits, shape=Shape.TREE)
        self.calibrations = [[Calibration() for _ in range(LEVELS)] for _ in members]

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]:
        free = [replace(budget, prices=None) for budget in budgets]
        found = [member.propose(rows, free, stop) for member in self.members]
        drafts = []
        for row, budget, *own in zip(rows, budgets, *found, strict=True):
            offers = row.private[self] = [Offer.of(draft) for draft in own]
            drafts.append(affordable(self.merge(row, offers), budget))
        return drafts

    def merge(self, row: DecodeState, offers: Sequence[Offer]) -> Draft:
        """All offers as one tree, with the chance of each node."""
        trie = Trie(row.tokens[-1])
        chances = [1.0]  # of each node, given that its parent is reached
        greedy = row.warp.greedy
        for offer, levels in zip(offers, self.calibrations, strict=True):
            place = [0]
            tree = offer.tree
            for node in range(1, len(tree)):
                at = trie.add(place[tree.parents[node]], tree.tokens[node : node + 1])
                place.append(at)
                level = levels[min(offer.depths[node], LEVELS) - 1]
                chance = level.chance(offer.chances[node], offer.ranks[node], greedy)
                if at == len(chances):
                    chances.append(chance)
                elif chance > chances[at]:
                    chances[at] = chance
        return Draft(trie.tree(), Draw.POINT, chances=of_paths(trie.parents, chances))

    def observe(self, step: Step) -> None:
        for row, said in zip(step.rows, step.emitted, strict=True):
            greedy = row.warp.greedy
            for offer, levels in zip(row.private[self], self.calibrations, strict=True):
                for node, depth, hit in trials(offer.tree, said):
                    level = levels[min(depth, LEVELS) - 1]
                    level.tried(offer.chances[node], offer.ranks[node], greedy, hit)
        super().observe(step)


@dataclass(slots=True)
class Offer:
    """A member's tree, and per node what its chance is said to be and how it is told apart."""

    tree: TokenTree
    chances: list[float]  # given that the parent is reached
    ranks: list[int]  # among its siblings, in node order
    depths: list[int]

    @classmethod
    def of(cls, draft: Draft) -> Offer:
        tree, said = draft.tree, draft.chances
        chances, ranks, depths = [1.0], [0], [0]
        children = [0] * len(tree)
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            chance = UNSAID
            if said is not None:
                chance = min(said[node] / said[parent], 1.0) if said[parent] > 0.0 else 0.0
            chances.append(chance)
            ranks.append(children[parent])
            depths.append(depths[parent] + 1)
            children[parent] += 1
        return cls(tree, chances, ranks, depths)


def of_paths(parents: Sequence[int], chances: Sequence[float]) -> tuple[float, ...]:
    """Chances of whole paths; of siblings only one can be right, so they share at most one."""
    total = [0.0] * len(parents)
    for node in range(1, len(parents)):
        total[parents[node]] += chances[node]
    paths = [1.0]
    for node in range(1, len(parents)):
        parent = parents[node]
        paths.append(paths[parent] * chances[node] / max(total[parent], 1.0))
    return tuple(paths)
