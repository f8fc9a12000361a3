"""A draft model grows a tree of likely continuations, best first (OPT-Tree, arXiv 2406.17276).

The value V of a node is the product of the draft model's probabilities along its path. V never
grows downwards, so the n largest values form a prefix-closed tree, and that tree has the largest
expected number of accepted tokens of all trees of n nodes. One draft forward per level scores those
nodes of the level that are among the n best so far. The draft is POINT: its laws only rank. Where
the budget names prices, a level or a node is drafted only if its value pays for it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nextafter

from foretoken.contract import DraftModel, StoppingRule
from foretoken.drafters.growers.at_once import AtOnce
from foretoken.drafters.growers.grower import Growth
from foretoken.drafters.growers.tree_growth import TreeGrowth
from foretoken.errors import check_values
from foretoken.trees.build import parents_among
from foretoken.trees.growing import Grown, GrowthRule
from foretoken.trees.templates import Form, Template
from foretoken.trees.worth import Calibration, Decline, added, paying
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Go,
    Memory,
    Scores,
    Shape,
    TokenTree,
    Traits,
    Verdict,
)
from foretoken.warp.plain import likeliest_of

FEED = 0.25  # share of a forward's price that feeding one more node to it may cost


class Ranker:
    """How candidates are ranked, and what was learned from those that were judged."""

    def __init__(
        self,
        branch: int,
        calibrate: bool,
        template: Form | None,
        min_gain: float = 0.0,
        level_gain: float = 0.0,
    ) -> None:
        self.branch, self.min_gain, self.level_gain = branch, min_gain, level_gain
        check_values(
            self,
            ("branch", branch >= 1, "1 or more children per node"),
            ("level_gain", level_gain >= 0.0, "0 (off) or more expected tokens"),
        )
        self.template = None if template is None else Template(template)
        self.calibration = Calibration() if calibrate and template is None else None
        self.decline = Decline()

    def width(self, vocab: int, nodes: int) -> int:
        """Children looked at below a node."""
        if self.template is not None:
            return min(self.template.width, vocab)
        return min(self.branch, vocab, nodes)


class BestFirstGrowth(TreeGrowth):
    """One row's tree under way: candidates in order of creation, and which of them are best."""

    def __init__(self, row: DecodeState, depth: int, budget: Budget, ranker: Ranker) -> None:
        super().__init__(row)
        self.depth, self.budget, self.ranker = depth, budget.nodes, ranker
        self.prices = budget.prices
        self.level_price = 0.0 if budget.prices is None else budget.prices.level
        # no node below it can ever pay
        self.floor = -1.0 if budget.prices is None else budget.prices.cheapest
        self.laws, self.values, self.ranks = [1.0], [1.0], [0]
        self.forms: dict[int, tuple[int, ...]] = {0: ()}  # paths in ranks, kept for templates only
        # -value and node of the `budget` best, best first; ties go to the older node, which keeps
        # parents before children
        self.best: list[tuple[float, int]] = []
        self.paid = 0  # of the best, the nodes that pay
        self.worth = 0.0  # expected tokens above their price
        self.gain = 0.0  # what the last level added to it
        self.kept = [0]  # the nodes that were proposed

    def rule(self) -> GrowthRule | None:
        """What the methods below do, in numbers; None for templates and laws that options cut.

        A rule has one bar for what a level gains: its price, or what `level_gain` asks of it.
        """
        ranker, bar = self.ranker, self.ranker.level_gain
        if ranker.template is not None or not self.warp.uncut or (bar and self.prices is not None):
            return None
        return GrowthRule(
            self.depth,
            self.budget,
            ranker.branch,
            self.warp.params.temperature,
            self.row.params.eos,
            () if self.prices is None else self.prices.nodes,
            self.floor,
            least=FEED * self.level_price,
            level=nextafter(bar, inf) if bar else self.level_price,  # more than the bar itself
            min_gain=ranker.min_gain,
            calibration=ranker.calibration,
            decline=None if bar else ranker.decline,
            greedy=self.greedy,
            rehearsed=self.row.rehearsal,
        )

    def adopt(self, grown: Grown) -> None:
        """Take over a tree that the model grew by this rule."""
        self.tokens, self.parents, self.ranks = grown.tokens, grown.parents, grown.ranks
        self.laws, self.values = grown.laws, grown.values
        self.places = {node: place for node, place in enumerate(grown.places) if place >= 0}
        self.best = [(-grown.values[node], node) for node in grown.best]
        self.paid, self.worth, self.gain = grown.paid, grown.worth, grown.gain
        self.frontier, self.level = grown.frontier, grown.level

    def take(self, score: Scores, stop: StoppingRule | None) -> bool:
        born, go = len(self.tokens), Go.ON
        if stop is None and self.warp.uncut:  # nobody asks for whole laws
            self.spawn(self.frontier, *self.best_of(score))
        else:
            nodes, laws = self.read(score.logits)
            go = self.ask(stop, nodes, laws, score)
            if go is Go.STOP:
                return False
            top, ids = laws.topk(self.ranker.width(laws.shape[-1], self.budget))
            self.spawn(nodes, ids.tolist(), top.tolist())
        last, before = self.gain, self.worth
        self.paid, self.worth = paying([-value for value, _ in self.best], self.prices)
        self.gain = self.worth - before
        self.level += 1
        self.frontier = self.fertile(born)
        if go is Go.LAST or self.level >= self.depth or not self.frontier:
            return False
        return self.ranker.template is not None or self.promising(last)

    def fertile(self, born: int) -> list[int]:
        """The nodes from `born` on that are worth feeding, best first."""
        eos, template = self.row.params.eos, self.ranker.template
        least = FEED * self.level_price
        return [
            node
            for value, node in self.best[: self.paid]
            if node >= born
            and -value >= least
            and self.tokens[node] not in eos
            and (template is None or template.children(self.forms[node]))
        ]

    def promising(self, last: float) -> bool:
        """Whether one level more is likely to pay, after a level before that gained `last`."""
        ranker = self.ranker
        if ranker.level_gain and self.gain <= ranker.level_gain:
            return False
        # The children of a level are worth at most the level itself.
        if added([self.values[node] for node in self.frontier]) < ranker.min_gain:
            return False
        if ranker.level_gain and self.prices is None:
            return True  # a level has no price that a further one might not be worth
        if self.level > 1 and not self.row.rehearsal:
            ranker.decline.update(last, self.gain)
        return self.gain * ranker.decline.share >= self.level_price

    def best_of(self, score: Scores) -> tuple[list[list[int]], list[list[float]]]:
        """The likeliest tokens after each node just fed, best first, and their probabilities."""
        few = score.few  # all that is finite, where that is little
        columns = (score.logits if few is None else few.logits).shape[-1]
        width = self.ranker.width(columns, self.budget)
        return likeliest_of(score.said, width, self.warp.params.temperature)

    def spawn(
        self, nodes: Sequence[int], tokens: list[list[int]], chances: list[list[float]]
    ) -> None:
        """Candidates below `nodes` that can still be among the best: of the likeliest tokens after
        each, best first, with their probabilities. One list may hold for all nodes.
        """
        chance, values, template = self.chance, self.values, self.ranker.template
        if len(chances) < len(nodes):
            chances, tokens = chances * len(nodes), tokens * len(nodes)
        best, least = self.best, self.least()
        for node, of_node, ids_of_node in zip(nodes, chances, tokens, strict=True):
            above = values[node]
            wanted = None if template is None else template.children(self.forms[node])
            for rank, (law, token) in enumerate(zip(of_node, ids_of_node, strict=True)):
                if not law > 0.0 or above <= least:  # NaN is no law either
                    break  # laws fall with the rank, and no child is worth more than its parent
                value = above * chance(law, rank)
                if value <= least:
                    if rank:
                        break  # only the favourite is trusted by another measure than the next
                    continue
                if wanted is not None:
                    if rank not in wanted:
                        continue
                    self.forms[len(self.tokens)] = (*self.forms[node], rank)
                insort(best, (-value, len(self.tokens)))
                del best[self.budget :]
                least = self.least()
                self.tokens.append(token)
                self.parents.append(node)
                self.laws.append(law)
                self.values.append(value)
                self.ranks.append(rank)

    def chance(self, law: float, rank: int) -> float:
        """Of a child, given its parent; in a row that is only timed, favourites are certain.

        A rehearsed text says nothing to the draft, and what a deep tree costs would stay unknown.
        """
        if self.row.rehearsal:
            return law if rank else 1.0
        calibration = self.ranker.calibration
        return law if calibration is None else calibration.chance(law, rank, self.greedy)

    def least(self) -> float:
        """The value that a further candidate must exceed."""
        full = len(self.best) == self.budget
        return -self.best[-1][0] if full else self.floor

    def draft(self) -> Draft:
        self.kept = kept = self.proposed()
        tokens = tuple([self.tokens[node] for node in kept])
        tree = TokenTree(tokens, tuple(parents_among(kept, self.parents)))
        return Draft(tree, Draw.POINT, chances=tuple([self.values[node] for node in kept]))

    def proposed(self) -> list[int]:
        """The best nodes that pay, in order of creation, the root first."""
        return [0, *sorted([node for _, node in self.best[: self.paid]])]

    def fed(self, path: Sequence[int]) -> list[int] | None:
        return super().fed([self.kept[node] for node in path])

    def judged(self, draft: Draft, verdict: Verdict) -> None:
        calibration = self.ranker.calibration
        if calibration is not None:
            laws = [self.laws[node] for node in self.kept]
            ranks = [self.ranks[node] for node in self.kept]
            calibration.judged(draft, verdict.path, laws, ranks, self.greedy)


class BestFirst(AtOnce):
    """Best-first growth under a node budget, or a static template of ranks."""

    traits = Traits(shape=Shape.TREE, memory=Memory.ENGINE, prices=True)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        branch: int = 8  # children considered per node
        min_gain: float = 0.05  # no further level once it can add fewer expected tokens than this
        # expected tokens that a level must add for another to follow; 0: any; OPT-Tree's paper 0.5
        level_gain: float = 0.0
        calibrate: bool = True  # correct the draft's confidence by what was accepted of it
        # None grows trees; (3, 2, 1) gives every node of a depth that many children;
        # ((0,), (1,), (0, 0)) lists paths of ranks, as Medusa's and Sequoia's files do
        template: Form | None = None

    def __init__(self, model: DraftModel, config: Config | None = None) -> None:
        super().__init__(model)
        self.config = config = config or self.Config()
        self.ranker = Ranker(
            config.branch, config.calibrate, config.template, config.min_gain, config.level_gain
        )

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        return BestFirstGrowth(row, depth, budget, self.ranker)
