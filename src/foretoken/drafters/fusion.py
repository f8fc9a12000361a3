"""Several drafters of fixed candidates in one tree, under one node budget.

Every member proposes its own tree; equal paths merge. What a member says of a node's chance is
calibrated by how often it was right before, per member, depth and confidence; a node proposed by
several gets the largest of these chances, which is corrected by what is known of its token
(`trees/token_odds.py`), and the nodes worth most are kept. Candidates stay fixed,
so the rule is exact whatever is merged (`methods/beyond/cascades.md`, algorithm 4; no paper).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretoken.contract import Drafter, Features, Guided, StoppingRule
from foretoken.drafters.parts.chances import chosen, given_parents, of_paths, trials
from foretoken.drafters.parts.look_up import LookUp
from foretoken.drafters.parts.members import Combination
from foretoken.errors import ConfigError, PairingError
from foretoken.native.look_ups import Calibrations, TokenTable, merged, merged_tried
from foretoken.trees.build import Trie, undrafted
from foretoken.trees.guesses import Guesses
from foretoken.trees.token_odds import TextOdds, TokenOdds
from foretoken.trees.worth import Calibration, least_paying
from foretoken.types import Budget, DecodeState, Draft, Memory, Rows, Shape, Step, Traits

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
        self.tokens = TokenOdds()
        self.tables = (
            Calibrations([one for levels in self.calibrations for one in levels]),
            Calibrations(self.agreed),
            TokenTable(self.tokens),
        )
        self.cut = Guesses()

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]:
        free = [unpriced(budget) for budget in budgets]
        for at, member in enumerate(self.members):
            if isinstance(member, LookUp):
                for row, budget in zip(rows, free, strict=True):
                    row.private[self].offers[at] = member.look_up(row, budget)
                continue
            for row, draft in zip(rows, member.propose(rows, free, stop), strict=True):
                row.private[self].offers[at].take(draft)
        return [self.merge(r, r.private[self], b) for r, b in zip(rows, budgets, strict=True)]

    def merge(self, row: DecodeState, text: _Text, budget: Budget) -> Draft:
        """All offers as one tree, as far as it pays. Its marks say how many have a node, its shares
        the best chance that any of them gives it, `given` what that is worth whatever its token."""
        found, offers, greedy = text.merged, text.offers, row.warp.greedy
        if all(len(offer) == 1 for offer in offers):
            found.clear(row.tokens[-1])
            return undrafted(row)
        if merged(found, offers, *self.tables, greedy, text.odds):
            return chosen(found, self.cut, budget)
        trie = Trie(row.tokens[-1])
        best, votes = [1.0], [0]
        for offer, levels in zip(offers, self.calibrations, strict=True):
            own: set[int] = set()  # a member has one vote, even for equal siblings
            tree, depths, ranks = offer.tree, offer.depths, offer.ranks
            offer.given = given_parents(offer.draft())
            place, given = [0], offer.given
            for node in range(1, len(tree)):
                at = trie.child(place[tree.parents[node]], tree.tokens[node])
                place.append(at)
                level = levels[min(depths[node], LEVELS) - 1]
                chance = level.chance(given[node], ranks[node], greedy)
                if at == len(best):
                    best.append(chance)
                    votes.append(0)
                votes[at] += at not in own
                own.add(at)
                best[at] = max(best[at], chance)
        chances = [
            self.agreed[count].chance(chance, 0, greedy)
            for chance, count in zip(best, votes, strict=True)
        ]
        tree = trie.tree()
        here = [
            self.tokens.chance(chance, token, tree.tokens[parent], text.odds)
            for chance, token, parent in zip(chances, tree.tokens, tree.parents, strict=True)
        ]
        found.fill(tree, of_paths(trie.parents, here), votes, best, chances)
        return chosen(found, self.cut, budget)

    def start(self, row: DecodeState, seen: Features | None) -> None:
        row.private[self] = _Text([Guesses() for _ in self.members])
        super().start(row, seen)

    def observe(self, step: Step) -> None:
        for row, said in zip(step.rows, step.emitted, strict=True):
            if not row.rehearsal:
                self.learn(row.private[self], said, row.warp.greedy)
        super().observe(step)

    def learn(self, text: _Text, said: Sequence[int], greedy: bool) -> None:
        """Compare all offers, and what was made of them, with the tokens that came."""
        found, offers, odds = text.merged, text.offers, text.odds
        if len(found) == 1:
            return
        if merged_tried(found, offers, *self.tables, greedy, odds, array("q", said)):
            return
        for offer, levels in zip(offers, self.calibrations, strict=True):
            given, ranks = offer.given, offer.ranks
            for node, depth, hit in trials(offer.tree, said):
                levels[min(depth, LEVELS) - 1].tried(given[node], ranks[node], greedy, hit)
        votes, best, chances, tree = found.marks, found.shares, found.given, found.tree
        for node, _, hit in trials(tree, said):
            self.agreed[votes[node]].tried(best[node], 0, greedy, hit)
            before = tree.tokens[tree.parents[node]]
            self.tokens.tried(chances[node], tree.tokens[node], before, odds, hit)


@dataclass(slots=True)
class _Text:
    """What is known of one row, and what was offered for the step under way."""

    offers: list[Guesses]  # of all members
    odds: TextOdds = field(default_factory=TextOdds)
    merged: Guesses = field(default_factory=Guesses)


def unpriced(budget: Budget) -> Budget:
    """What members may offer: all that could pay, even if they underrate it."""
    least = least_paying(budget)
    return Budget(budget.depth, budget.nodes, least=None if least is None else DOUBT * least)
