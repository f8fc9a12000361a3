"""Several drafters of fixed candidates in one tree, under one node budget.

Every member proposes its own tree; equal paths merge. What a member says of a node's chance is
calibrated by how often it was right before, per member, depth and confidence; a node proposed by
several gets the largest of these chances, and the nodes worth most are kept. Candidates stay fixed,
so the rule is exact whatever is merged (`methods/beyond/cascades.md`, algorithm 4; no paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretoken.contract import Drafter, Features, Guided, StoppingRule
from foretoken.drafters.parts.chances import affordable, of_paths, trials
from foretoken.drafters.parts.members import Combination
from foretoken.errors import ConfigError, PairingError
from foretoken.trees.build import Trie, root, undrafted
from foretoken.trees.worth import Calibration, TextBias, least_paying
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
DOUBT = 0.5  # share of its real chance that a member may say of a node without losing it
TRUST = 12.0  # children whose chance is taken at a member's word at first
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
        self.calibrations = [[Calibration(TRUST) for _ in range(LEVELS)] for _ in members]
        self.agreed = [Calibration(TRUST) for _ in range(len(members) + 1)]  # by how many agree

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]:
        free = [unpriced(budget) for budget in budgets]
        found = [member.propose(rows, free, stop) for member in self.members]
        drafts = []
        for row, budget, *own in zip(rows, budgets, *found, strict=True):
            text: _Text = row.private[self]
            text.offers = [Offer.of(draft) for draft in own]
            drafts.append(affordable(self.merge(row, text), budget))
        return drafts

    def merge(self, row: DecodeState, text: _Text) -> Draft:
        """All offers as one tree, with the chance of each node."""
        if not any(len(offer.tree) > 1 for offer in text.offers):
            draft = undrafted(row)
            text.merged, text.chances = draft.tree, [1.0]
            return draft
        trie = Trie(row.tokens[-1])
        best, votes = [1.0], [0]  # of each node: what any member gives it, and how many do
        greedy = row.warp.greedy
        for offer, levels in zip(text.offers, self.calibrations, strict=True):
            place = [0]
            tree = offer.tree
            for node in range(1, len(tree)):
                at = trie.child(place[tree.parents[node]], tree.tokens[node])
                place.append(at)
                level = levels[min(offer.depths[node], LEVELS) - 1]
                chance = level.chance(offer.chances[node], offer.ranks[node], greedy)
                if at == len(best):
                    best.append(chance)
                    votes.append(1)
                    continue
                votes[at] += 1
                if chance > best[at]:
                    best[at] = chance
        text.merged, text.best, text.votes = trie.tree(), best, votes
        chances = text.chances = [
            self.agreed[count].chance(chance, 0, greedy)
            for chance, count in zip(best, votes, strict=True)
        ]
        factor = text.bias.factor
        here = [min(chance * factor, 1.0) for chance in chances]
        return Draft(text.merged, Draw.POINT, chances=of_paths(trie.parents, here))

    def start(self, row: DecodeState, seen: Features | None) -> None:
        row.private[self] = _Text()
        super().start(row, seen)

    def observe(self, step: Step) -> None:
        for row, said in zip(step.rows, step.emitted, strict=True):
            if row.rehearsal:
                continue
            greedy, text = row.warp.greedy, row.private[self]
            for offer, levels in zip(text.offers, self.calibrations, strict=True):
                for node, depth, hit in trials(offer.tree, said):
                    level = levels[min(depth, LEVELS) - 1]
                    level.tried(offer.chances[node], offer.ranks[node], greedy, hit)
            for node, _, hit in trials(text.merged, said):
                self.agreed[text.votes[node]].tried(text.best[node], 0, greedy, hit)
                text.bias.tried(text.chances[node], hit)
        super().observe(step)


@dataclass(slots=True)
class _Text:
    """What is known of one row, and what was offered for the step under way."""

    bias: TextBias = field(default_factory=TextBias)
    offers: list[Offer] = field(default_factory=list)
    merged: TokenTree = field(default_factory=lambda: root(0))
    best: list[float] = field(default_factory=list)  # of its nodes: the best that a member says
    votes: list[int] = field(default_factory=list)  # members that propose it
    chances: list[float] = field(default_factory=list)  # in any text


def unpriced(budget: Budget) -> Budget:
    """What members may offer: all that could pay, even if they underrate it."""
    least = least_paying(budget)
    return replace(budget, prices=None, least=None if least is None else DOUBT * least)


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
        if len(tree) == 1:
            return cls(tree, [1.0], [0], [0])
        chances = [1.0] + [UNSAID] * (len(tree) - 1)
        if said is not None:
            for node in range(1, len(tree)):
                above = said[tree.parents[node]]
                chances[node] = min(said[node] / above, 1.0) if above > 0.0 else 0.0
        return cls(tree, chances, tree.ranks(), tree.depths())
