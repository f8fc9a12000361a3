"""Look-ups in one tree, and a draft model's tree where they leave something to guess.

Look-ups cost next to nothing and know what was copied; a draft model knows what is new and costs a
forward per level. So look-ups are asked first, the draft model only where its tree is likely to add
more expected tokens than it costs, and both trees become one, whose nodes are worth what nodes that
were proposed alike came to. All candidates are fixed: choosing among them changes no law. RASD
(arXiv 2503.03434) always asks the model, and lets it veto what was looked up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretoken.contract import Drafter, Features, Guided, NoOptions, StoppingRule
from foretoken.drafters.fusion import Fusion, unpriced
from foretoken.drafters.growers.grower import ModelDrafter
from foretoken.drafters.parts.agreement import Agreement, Gain
from foretoken.drafters.parts.chances import affordable, given_parents, of_paths, trials
from foretoken.drafters.parts.members import Combination, own_part
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.drafters.parts.steps_left import StepsLeft
from foretoken.errors import PairingError
from foretoken.trees.build import Trie
from foretoken.trees.token_odds import TextOdds, TokenOdds
from foretoken.trees.worth import paying
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Memory,
    Prices,
    Rows,
    Shape,
    Step,
    TokenTree,
    Traits,
)

LEFT = 0.02  # least chance that a model is taken to leave for tokens it did not name


class Hybrid(Combination):
    """A drafter's tree of fixed candidates, and what look-ups hold, as one tree."""

    traits = Traits(shape=Shape.TREE, memory=Memory.ENGINE, prices=True)

    def __init__(self, inner: Drafter, *look_ups: Drafter, config: NoOptions | None = None) -> None:
        if not (inner.traits.fixed and inner.traits.prices):
            raise PairingError(
                f"{type(inner).__name__} was asked to grow trees that look-ups are merged with.",
                "its candidates have to be fixed (point), and it has to say their chances.",
                "use a drafter that grows best first, as method tree does.",
            )
        self.inner, self.look_ups = inner, Fusion(*look_ups)
        super().__init__(inner, self.look_ups)
        self.traits = replace(self.traits, shape=Shape.TREE)
        # a draft model that reads a text when it is asked
        self.reader = inner.reader if isinstance(inner, ModelDrafter) else None
        if isinstance(inner, Guided):
            self.model = inner.model
        self.agreement, self.tokens = Agreement(), TokenOdds()
        # by the bit length of the number of rows: prices differ
        self.gains: defaultdict[int, Gain] = defaultdict(Gain)
        self.left = StepsLeft()

    def start(self, row: DecodeState, seen: Features | None) -> None:
        row.private[self] = _Text()
        super().start(row, seen)

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]:
        found = self.look_ups.propose(rows, [unpriced(budget) for budget in budgets], stop)
        if not any(budget.depth for budget in budgets):
            for row in rows:
                row.private[self].union, row.private[self].begun = None, True
            return found
        gain = self.gains[len(rows).bit_length()]
        places = [
            self.asking(gain, row, looked_up, budget, len(rows))
            for row, looked_up, budget in zip(rows, found, budgets, strict=True)
        ]
        own = shared_by_asked(budgets, [place is not None for place in places])
        grown = self.inner.propose(rows, own, stop)
        drafts = []
        for row, budget, tree, looked_up, place in zip(
            rows, own, grown, found, places, strict=True
        ):
            text: _Text = row.private[self]
            text.begun = True
            union = text.union = Union(tree, looked_up)
            union.judge(row.warp.greedy, self.agreement, self.tokens, text.odds)
            if place is not None and budget.prices is not None and not row.rehearsal:
                gain.update(place, union.gain(looked_up, budget))
            draft = affordable(union.draft, budget)
            union.cut(draft)
            drafts.append(draft)
        return drafts

    def asking(
        self, gain: Gain, row: DecodeState, found: Draft, budget: Budget, rows: int
    ) -> int | None:
        """The class of what was looked up, where the draft model is to be asked as well."""
        if isinstance(self.inner, ModelDrafter) and self.inner.reach(row, budget) <= 0:
            return None  # it would guess nothing, which says nothing of what it is worth
        assert found.chances is not None, "look-ups say the chance of each node"
        place = gain.place(found.chances, found.tree.parents)
        prices = budget.prices
        if prices is None or prices.level <= 0.0 or row.rehearsal:
            return place
        begun = row.private[self].begun
        if not begun and isinstance(self.reader, OrdinaryModel) and self.reader.waits(row):
            # Its first token goes out before the draft model reads the prompt; a head reads what
            # the target has made of it, which takes a twentieth of that.
            return None
        reading = rows * self.reading_price(row, prices)
        return place if gain.promising(place, rows, reading) else None

    def reading_price(self, row: DecodeState, prices: Prices) -> float:
        """Expected tokens, of every step to come, that each row waits while a text is read."""
        seconds = 0.0 if self.reader is None else self.reader.to_read(row)
        return prices.second * seconds / self.left.of(row)

    def observe(self, step: Step) -> None:
        """Learn what nodes are worth; the drafter sees its own part of the tree."""
        unions = [row.private[self].union for row in step.rows]
        for row, union, said in zip(step.rows, unions, step.emitted, strict=True):
            if not row.rehearsal:
                self.left.stepped(len(said))
            if union is not None and not row.rehearsal:
                union.teach(said, self.agreement, self.tokens, row.private[self].odds)
        own = step
        if any(union is not None for union in unions):  # rows that were asked for apart may differ
            pairs = zip(unions, step.drafts, strict=True)
            own = own_part(step, [draft if one is None else one.grown for one, draft in pairs])
        self.inner.observe(own)
        self.look_ups.observe(step)

    def finish(self, row: DecodeState) -> None:
        self.left.ended(row)
        super().finish(row)


def shared_by_asked(budgets: Sequence[Budget], asked: Sequence[bool]) -> list[Budget]:
    """Budgets of rows whose drafter is asked or not: who is asked bears what a level makes all wait
    who might have been.
    """
    granted = sum([budget.depth > 0 for budget in budgets])
    share = granted / max(sum(asked), 1)
    dearer: dict[Prices, Prices] = {}
    found = []
    for budget, is_asked in zip(budgets, asked, strict=True):
        prices = budget.prices
        if not is_asked:
            budget = replace(budget, depth=0)
        elif share != 1.0 and prices is not None:
            if prices not in dearer:
                dearer[prices] = replace(prices, level=share * prices.level)
            budget = replace(budget, prices=dearer[prices])
        found.append(budget)
    return found


class Union:
    """One row's union of both trees, the drafter's nodes first."""

    def __init__(self, grown: Draft, found: Draft) -> None:
        self.grown, self.size = grown, len(grown.tree)
        self.modelled: list[float | None] = [*given_parents(grown)]
        self.looked_up: list[float | None] = [None] * self.size
        trie = Trie.of(grown.tree)
        place = [0]
        for node, chance in enumerate(given_parents(found)[1:], 1):
            at = trie.child(place[found.tree.parents[node]], found.tree.tokens[node])
            if at == len(self.modelled):
                self.modelled.append(None)
                self.looked_up.append(None)
            self.looked_up[at] = chance
            place.append(at)
        self.tree: TokenTree = trie.tree()
        # Of each node: its class in `Agreement`, what both sides promise, what that is worth
        # whatever its token, all given its parent.
        self.places, self.promises, self.chances = [0], [1.0], [1.0]
        self.draft = Draft(self.tree, Draw.POINT)

    def judge(self, greedy: bool, agreement: Agreement, tokens: TokenOdds, odds: TextOdds) -> None:
        """Find the chance of every node, in this text."""
        said, parents = self.tree.tokens, self.tree.parents
        modelled, looked_up = self.modelled, self.looked_up
        asked = set(parents[1 : self.size])
        by_model, by_look_up = [0.0] * len(parents), [0.0] * len(parents)
        for node, parent in enumerate(parents[1:], 1):
            by_model[parent] += modelled[node] or 0.0
            by_look_up[parent] += looked_up[node] or 0.0
        here = [1.0]
        for node, parent in enumerate(parents[1:], 1):
            model, look_up = modelled[node], looked_up[node]
            promise = max(model or 0.0, look_up or 0.0)
            if model is None and parent in asked:  # the chance that the model's children leave
                promise *= max(1.0 - by_model[parent], LEFT)
            place = agreement.place(greedy, model, parent in asked, look_up, by_look_up[parent])
            chance = agreement.chance(place, promise)
            self.places.append(place)
            self.promises.append(promise)
            self.chances.append(chance)
            here.append(tokens.chance(chance, said[node], said[parent], odds))
        self.draft = Draft(self.tree, Draw.POINT, chances=of_paths(parents, here))

    def gain(self, found: Draft, budget: Budget) -> float:
        """Expected tokens, above their price, that the drafter's tree adds to what was found."""
        assert budget.prices is not None
        both, alone = (
            paying(sorted((draft.chances or ())[1:], reverse=True)[: budget.nodes], budget.prices)
            for draft in (self.draft, found)
        )
        levels = max(*self.grown.tree.depths(), 1)
        return both[1] - alone[1] - levels * budget.prices.level

    def cut(self, draft: Draft) -> None:
        """Leave the drafter the part that is in `draft`, as which the union is scored."""
        if draft.origin is not None:
            self.grown = self.grown.keep([node for node in draft.origin if node < self.size])

    def teach(
        self, said: Sequence[int], agreement: Agreement, tokens: TokenOdds, odds: TextOdds
    ) -> None:
        """Compare all nodes, scored or not, with what the target said where it went."""
        for node, _, hit in trials(self.tree, said):
            agreement.tried(self.places[node], self.promises[node], hit)
            token, before = self.tree.tokens[node], self.tree.tokens[self.tree.parents[node]]
            tokens.tried(self.chances[node], token, before, odds, hit)


@dataclass(slots=True)
class _Text:
    """What is known of one row."""

    odds: TextOdds = field(default_factory=TextOdds)
    union: Union | None = None  # of the step under way
    begun: bool = False  # whether it was drafted for; tokens may be forced before
