"""The target guesses with some of its sublayers left out, found while it writes (SWIFT, arXiv
2410.06916).

The draft stops after a token it was not sure of, and the tree widens where it was not: siblings are
the next best tokens (POINT) at temperature 0, and further draws without replacement (DISTINCT)
above. How many siblings a node gets depends on tokens drawn before them only.

Where we differ: under a budget with prices both ends of a draft, its length and its width, follow
what a token costs on this machine. The search takes a bounded share of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.growers.chain import ChainGrowth
from foretoken.drafters.growers.grower import Grower, Growth, Opened
from foretoken.drafters.growers.levels import distinct
from foretoken.drafters.parts.chances import affordable
from foretoken.drafters.parts.experience import Experience
from foretoken.drafters.parts.part_of_target import PartOfTarget
from foretoken.drafters.parts.skip_search import SkipConfig, SkipSearch
from foretoken.errors import CapabilityError
from foretoken.lm.views.wrapping import skipped_layers
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Memory,
    Prices,
    Ragged,
    Rows,
    Scores,
    Shape,
    Step,
    Taps,
    TokenTree,
    Traits,
    Verdict,
)
from foretoken.warp.residual import without

# children of a node by how sure the draft was of the first: (sure above, greedy, sampled)
WIDTHS = ((0.95, 3, 1), (0.8, 5, 3), (0.5, 8, 5), (-1.0, 10, 10))


@dataclass(slots=True)
class Drafting(Opened):
    """What is known of a row's drafts."""

    experience: Experience = field(kw_only=True)


class SiblingGrowth(ChainGrowth):
    """One row's chain under way; what the budget has left when it ends goes to siblings."""

    def __init__(
        self, row: DecodeState, depth: int, budget: Budget, stop_below: float, known: Experience
    ) -> None:
        super().__init__(row, depth)
        self.budget, self.stop_below, self.known = budget, stop_below, known
        self.notes: list[tuple[float, Tensor]] = []  # how sure each token was, and its logits
        self.reached = [1.0]  # the chance that each node of the chain stands, the root's first
        self.laws_of: list[float] = []  # of every node below the root, before any sampling option
        self.ranks: list[int] = []

    def taken(self, score: Scores) -> bool:
        """Not after a token that was unlikely before any sampling option; it stays drafted."""
        sure = self.sure(score)
        self.notes.append((sure, score.logits[0]))
        self.reached.append(self.reached[-1] * self.chance(sure, 0))
        prices = self.budget.prices
        if prices is None:
            return sure >= self.stop_below
        return self.reached[-1] * self.known.share >= prices.one_more(len(self.tokens))

    def draft(self) -> Draft:
        """The chain and its siblings."""
        tokens, parents = [self.row.tokens[-1]], [-1]
        laws: list[Tensor | None] = [None]
        chances = [1.0]
        above = 0
        for depth, (token, beside) in enumerate(zip(self.tokens, self.siblings(), strict=True)):
            if not self.greedy:
                laws[above] = self.laws[depth]
            children = [token, *beside]
            parents += [above] * len(children)
            above = len(tokens)
            tokens += children
            laws += [None] * len(children)
            chances += self.valued(depth, children)
        tree = TokenTree(tuple(tokens), tuple(parents))
        if self.greedy:
            whole = Draft(tree, Draw.POINT, chances=tuple(chances))
            return affordable(whole, self.budget)
        return Draft(tree, Draw.DISTINCT, tuple(laws), chances=tuple(chances))

    def valued(self, depth: int, children: Sequence[int]) -> list[float]:
        """The chances of a token of the chain and of its siblings."""
        sure, logits = self.notes[depth]
        law = logits.float().softmax(-1)
        probabilities = [sure, *law[list(children[1:])].tolist()]
        self.laws_of += probabilities
        self.ranks += range(len(children))
        worth = [self.worth(depth, law, rank) for rank, law in enumerate(probabilities)]
        return [self.reached[depth + 1], *worth[1:]]

    def worth(self, depth: int, law: float, rank: int) -> float:
        """The chance of a sibling of this law and rank beside a token of the chain."""
        return self.reached[depth] * self.chance(law, rank)

    def chance(self, law: float, rank: int) -> float:
        """The chance of a token of this law and rank, as experience corrects it."""
        return self.known.calibration.chance(law, rank, self.greedy) if law > 0.0 else 0.0

    def siblings(self) -> list[list[int]]:
        """Further candidates beside each token of the chain, where they are worth most.

        How many a place gets follows from its law and from the chain, before any of them is drawn:
        without prices the least sure places come first, with as many as the paper's table says.
        """
        left = self.budget.nodes - len(self.tokens)
        counts = [width(sure, self.greedy) - 1 for sure, _ in self.notes]
        places = sorted(range(len(counts)), key=lambda at: self.notes[at][0])
        if self.budget.prices is not None:
            counts = self.paid(counts, self.budget.prices)
        found: list[list[int]] = [[] for _ in self.tokens]
        for depth in places:
            count = min(counts[depth], left)
            if count > 0:
                found[depth] = (self.next_best if self.greedy else self.drawn)(depth, count)
            left -= len(found[depth])
        return found

    def paid(self, most: Sequence[int], prices: Prices) -> list[int]:
        """How many siblings pay at each place, by the likeliest tokens beside the chain's own."""
        offers: list[tuple[float, int]] = []
        for depth, (_, logits) in enumerate(self.notes):
            if most[depth] > 0:
                law = logits.float().softmax(-1)
                law[self.tokens[depth]] = 0.0
                best = law.topk(min(most[depth], len(law))).values.tolist()
                offers += [(self.worth(depth, p, rank), depth) for rank, p in enumerate(best, 1)]
        counts, nodes = [0] * len(most), len(self.tokens)
        for value, depth in sorted(offers, reverse=True):
            if (
                nodes + 1 >= len(prices.nodes)
                or value <= prices.nodes[nodes + 1] - (prices.nodes[nodes])
            ):
                break
            counts[depth] += 1
            nodes += 1
        return counts

    def judged(self, draft: Draft, verdict: Verdict) -> None:
        """What stands of the chain and beside it tells what such a draft is worth."""
        laws, ranks = [1.0, *self.laws_of], [0, *self.ranks]
        self.known.calibration.judged(draft, verdict.path, laws, ranks, self.greedy)
        origin = draft.origin or range(len(draft.tree))
        chain = [node for node in range(1, len(draft.tree)) if ranks[origin[node]] == 0]
        stood = sum(node in verdict.path for node in chain)
        self.known.tried(stood, len(chain))

    def next_best(self, depth: int, count: int) -> list[int]:
        """The `count` most likely tokens but the one taken, impossible ones left out."""
        scores = self.row.warp.biased(self.notes[depth][1])
        best = scores.topk(min(count + 1, len(scores)))
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        taken = self.tokens[depth]
        return [t for value, t in pairs if t != taken and value > float("-inf")][:count]

    def drawn(self, depth: int, count: int) -> list[int]:
        """Up to `count` further draws without replacement from the law the token came from."""
        law = self.laws[depth]
        assert law is not None, "sampled tokens come with their law"
        left = without(law, self.tokens[depth])
        return [] if left is None else distinct(left, count, self.row.coins)


class LayerSet(Grower):
    """A chain that stops when unsure; nodes that the budget grants beyond it are siblings."""

    traits = Traits(
        frozenset({Draw.POINT, Draw.DISTINCT}), Shape.TREE, memory=Memory.ENGINE, prices=True
    )

    Config = SkipConfig

    def __init__(self, target: LanguageModel, config: SkipConfig | None = None) -> None:
        self.config = config or self.Config()
        self.layers = SomeLayers(target, self.config)
        super().__init__(self.layers)
        self.shared = Experience()

    def opened(self, row: DecodeState) -> Opened:
        return Drafting(experience=Experience() if row.repeatable else self.shared)

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        known: Drafting = row.private[self]
        return SiblingGrowth(row, depth, budget, self.config.stop_below, known.experience)

    def observe(self, step: Step) -> None:
        super().observe(step)
        self.layers.learn(step.rows, step.times.whole)

    def report(self) -> str:
        """What the search took and found."""
        search = self.layers.latest
        if not search.tries:
            return ""
        hopeless = "" if search.promise >= 1.0 else "; no draft of it can pay"
        return (
            f"the search for layers to skip took {search.cost.seconds:.1f} s and {search.tries} "
            f"tries{', and has ended' if search.done else ''}; the set in use guessed "
            f"{search.best:.0%} of the {search.config.window} tokens it was judged by{hopeless}"
        )


class SomeLayers(PartOfTarget):
    """The target less some sublayers as its own draft model.

    One search serves all texts, except those whose seed has to give the same text in any company:
    each of them has a search of its own, and begins anew.
    """

    def __init__(self, target: LanguageModel, config: SkipConfig) -> None:
        super().__init__(target)
        self.view, self.config = skipped_layers(target), config
        config.check(self.view.units)
        self.shared = self.latest = SkipSearch(self.view, config)
        if not self.shared.done and not self.view.searchable:
            raise CapabilityError(
                "a search for skipped layers was asked for with exact_bits=True.",
                "it reads tokens far from their own columns, and sums would change their order.",
                "pass skip=(...), a set found before, or search_interval=0, or drop exact_bits.",
            )

    def search(self, row: DecodeState) -> SkipSearch:
        """The search that a row's drafts follow."""
        search: SkipSearch = row.private.get(self, self.shared)
        return search

    def learn(self, rows: Rows, seconds: float) -> None:
        """A round of these rows went by: searches may try another set on what was written."""
        if self.hopeless:
            return
        followers: dict[SkipSearch, list[DecodeState]] = {}
        for row in rows:
            if not row.rehearsal:
                followers.setdefault(self.search(row), []).append(row)
        for search, written in followers.items():
            if search.round_passed(written, seconds):
                self.latest = search

    def rehearsed(
        self, row: DecodeState, seen: Features | None, right: int, asked: int, price: float
    ) -> None:
        """See whether the set that was given can pay, or any that a search tries on this text."""
        if self.shared.done:
            super().rehearsed(row, seen, right, asked, price)
            return
        search = SkipSearch(self.view, self.config)  # what texts are drafted by is found in texts
        self.hopeless = search.finds_nothing(row)
        if self.hopeless:
            self.latest = search

    def open(self, row: DecodeState, features: Features | None) -> bool:
        fits = super().open(row, features)
        if fits and row.repeatable:
            row.private[self] = SkipSearch(self.view, self.config, counted=True)
        return fits

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        together: dict[frozenset[int], list[int]] = {}
        for at, row in enumerate(rows):
            together.setdefault(self.search(row).skipped, []).append(at)
        found: dict[int, Tensor] = {}
        for skipped, places in together.items():
            logits = self.view.draft(
                [rows[at] for at in places],
                [tokens[at] for at in places],
                [parents[at] for at in places],
                skipped,
            )
            found.update(zip(places, logits, strict=True))
        return [Scores(found[at]) for at in range(len(rows))]


def width(sure: float, greedy: bool) -> int:
    """Children of a node whose first child the draft gave the probability `sure`."""
    for least, fixed, sampled in WIDTHS:
        if sure > least:
            return fixed if greedy else sampled
    raise AssertionError("a probability lies above -1")
