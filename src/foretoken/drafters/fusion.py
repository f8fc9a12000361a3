"""Several drafters of fixed candidates in one tree, under one node budget.

Every source proposes its own tree; equal paths merge. What a source says of a node's chance is
corrected by how often it was right before, per source, depth, and confidence; a node proposed by
several gets the largest of these chances, and the nodes worth most are kept. Candidates stay fixed,
so the rule is exact whatever is merged (`methods/beyond/cascades.md`, algorithm 4; no paper).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from foretoken.drafters.rows import RowDrafter
from foretoken.drafters.weighing import WeighingDrafter, affordable, emitted, trials
from foretoken.errors import ConfigError, PairingError
from foretoken.trees.build import Trie
from foretoken.trees.worth import Trust
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Drafter,
    Draw,
    KeepGoing,
    Remembers,
    Scores,
    TokenTree,
    Verdict,
)

UNSAID = 0.5  # chance of a child, from a source that names none; experience corrects it
LEVELS = 4  # depths told apart; deeper ones count as the last


class Fusion(RowDrafter):
    """One tree from many; every source sees every outcome."""

    trees = True
    valued = sparing = True

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        # methods to merge in place of the row's own; whoever builds the drafter reads this
        sources: tuple[str, ...] | None = None

    def __init__(self, *sources: Drafter, config: Config | None = None) -> None:
        self.config = config or self.Config()
        if not sources:
            raise ConfigError(
                "a fusion of no sources was asked for.",
                "it merges the drafts of one or more methods.",
                "pass for instance sources=['suffix', 'token-recycling'].",
            )
        for source in sources:
            if source.draws != {Draw.POINT} or source.taps:
                raise PairingError(
                    f"{type(source).__name__} was asked to be merged with other drafters.",
                    "only fixed (point) candidates can be chosen again after they were made, and "
                    "only drafters that read no hidden layers.",
                    "merge look-up methods: prompt-lookup, suffix, token-recycling, lookahead.",
                )
        self.sources = sources
        self.trees = len(sources) > 1 or sources[0].trees
        self.trust = [[Trust() for _ in range(LEVELS)] for _ in sources]

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        row.draft = _State([None] * len(self.sources))
        self.each([row], lambda source, at: source.start(row, seen))

    def propose(
        self, rows: Sequence[DecodeState], budgets: Sequence[Budget], keep_going: KeepGoing
    ) -> list[Draft]:
        free = [replace(budget, level_price=0.0, node_prices=()) for budget in budgets]
        for row in rows:
            row.draft.offers = []

        def ask(source: Drafter, at: int) -> list[tuple[TokenTree, list[float]]]:
            if isinstance(source, WeighingDrafter):
                return [source.weigh(r, b) for r, b in zip(rows, free, strict=True)]
            trees = [draft.tree for draft in source.propose(rows, free, keep_going)]
            return [(tree, [UNSAID**depth for depth in tree.depths()]) for tree in trees]

        for weighed in self.each(rows, ask):
            for row, (tree, values) in zip(rows, weighed, strict=True):
                row.draft.offers.append(Offer.of(tree, values))
        return [
            Draft(self.merge(row, budget), Draw.POINT)
            for row, budget in zip(rows, budgets, strict=True)
        ]

    def worth(self, row: DecodeState) -> float:
        """Expected tokens above their price of the row's last proposal."""
        worth: float = row.draft.worth
        return worth

    def merge(self, row: DecodeState, budget: Budget) -> TokenTree:
        """All offers as one tree, cut to the nodes with the largest chances."""
        trie = Trie(row.tokens[-1])
        chances = [1.0]  # of each node, given that its parent is reached
        greedy = row.warp.greedy
        for offer, trust in zip(row.draft.offers, self.trust, strict=True):
            place = [0]
            tree = offer.tree
            for node in range(1, len(tree)):
                at = trie.add(place[tree.parents[node]], tree.tokens[node : node + 1])
                place.append(at)
                level = trust[min(offer.depths[node], LEVELS) - 1]
                chance = level.chance(offer.chances[node], offer.ranks[node], greedy)
                if at == len(chances):
                    chances.append(chance)
                elif chance > chances[at]:
                    chances[at] = chance
        tree, row.draft.worth = affordable(trie.tree(), _values(trie.parents, chances), budget)
        return tree

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
            said, greedy = emitted(draft.tree, verdict), row.warp.greedy
            for offer, trust in zip(row.draft.offers, self.trust, strict=True):
                for node, depth, hit in trials(offer.tree, said):
                    level = trust[min(depth, LEVELS) - 1]
                    level.tried(offer.chances[node], offer.ranks[node], greedy, hit)
        self.each(rows, lambda source, at: source.observe(rows, drafts, scores, verdicts))

    def finish(self, row: DecodeState) -> None:
        self.each([row], lambda source, at: source.finish(row))

    def save(self) -> None:
        """Keep what the sources have learnt, where their options name a file."""
        for source in self.sources:
            if isinstance(source, Remembers):
                source.save()

    def each(self, rows: Sequence[DecodeState], act: Callable[[Drafter, int], Any]) -> list[Any]:
        """Let every source act on the rows; each finds its own private state in `row.draft`."""
        states = [row.draft for row in rows]
        results = []
        for at, source in enumerate(self.sources):
            for row, state in zip(rows, states, strict=True):
                row.draft = state.own[at]
            results.append(act(source, at))
            for row, state in zip(rows, states, strict=True):
                state.own[at] = row.draft
        for row, state in zip(rows, states, strict=True):
            row.draft = state
        return results


@dataclass(slots=True)
class _State:
    """What is kept of one row."""

    own: list[Any]  # what each source keeps of it
    offers: list[Offer] = field(default_factory=list)  # the trees of the step under way
    worth: float = 0.0  # of what was made of them


@dataclass(slots=True)
class Offer:
    """A source's tree, and per node what its chance is said to be and how it is told apart."""

    tree: TokenTree
    chances: list[float]  # given that the parent is reached
    ranks: list[int]  # among its siblings, in node order
    depths: list[int]

    @classmethod
    def of(cls, tree: TokenTree, values: Sequence[float]) -> Offer:
        chances, ranks, depths = [1.0], [0], [0]
        children = [0] * len(tree)
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            chances.append(min(values[node] / values[parent], 1.0) if values[parent] > 0.0 else 0.0)
            ranks.append(children[parent])
            depths.append(depths[parent] + 1)
            children[parent] += 1
        return cls(tree, chances, ranks, depths)


def _values(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    """Chances of whole paths; of siblings only one can be right, so they share at most one."""
    total = [0.0] * len(parents)
    for node in range(1, len(parents)):
        total[parents[node]] += chances[node]
    values = [1.0]
    for node in range(1, len(parents)):
        parent = parents[node]
        values.append(values[parent] * chances[node] / max(total[parent], 1.0))
    return values
