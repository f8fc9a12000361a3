"""The target guesses with some of its sublayers left out, found while it writes (SWIFT, arXiv
2410.06916).

The draft stops after a token it was not sure of, and the tree widens where it was not: siblings are
the next best tokens (POINT) at temperature 0, and further draws without replacement (DISTINCT)
above. How many siblings a node gets depends on tokens drawn before them only.
"""

from __future__ import annotations

from torch import Tensor

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.growers.chain import ChainGrowth
from foretoken.drafters.growers.grower import Grower, Growth
from foretoken.drafters.growers.levels import distinct, without
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
    Ragged,
    Rows,
    Scores,
    Shape,
    Step,
    Taps,
    TokenTree,
    Traits,
)

# children of a node by how sure the draft was of the first: (sure above, greedy, sampled)
WIDTHS = ((0.95, 3, 1), (0.8, 5, 3), (0.5, 8, 5), (-1.0, 10, 10))


class SiblingGrowth(ChainGrowth):
    """One row's chain under way; nodes granted beyond its depth become siblings."""

    def __init__(self, row: DecodeState, depth: int, nodes: int, stop_below: float) -> None:
        super().__init__(row, depth)
        self.spare, self.stop_below = nodes - depth, stop_below
        self.notes: list[tuple[float, Tensor]] = []  # how sure each token was, and its logits

    def taken(self, logits: Tensor) -> bool:
        """Not after a token that was unlikely before any sampling option; it stays drafted."""
        sure = self.sure(logits)
        self.notes.append((sure, logits))
        return sure >= self.stop_below

    def draft(self) -> Draft:
        """The chain and its siblings."""
        tokens, parents = [self.row.tokens[-1]], [-1]
        laws: list[Tensor | None] = [None]
        above = 0
        for depth, (token, beside) in enumerate(zip(self.tokens, self.siblings(), strict=True)):
            if not self.greedy:
                laws[above] = self.laws[depth]
            children = [token, *beside]
            parents += [above] * len(children)
            above = len(tokens)
            tokens += children
            laws += [None] * len(children)
        tree = TokenTree(tuple(tokens), tuple(parents))
        if self.greedy:
            return Draft(tree, Draw.POINT)
        return Draft(tree, Draw.DISTINCT, tuple(laws))

    def siblings(self) -> list[list[int]]:
        """Further candidates beside each token of the chain, the least sure places first."""
        found: list[list[int]] = [[] for _ in self.tokens]
        left = self.spare
        for depth in sorted(range(len(found)), key=lambda at: self.notes[at][0]):
            count = min(width(self.notes[depth][0], self.greedy) - 1, left)
            if count > 0:
                found[depth] = (self.next_best if self.greedy else self.drawn)(depth, count)
            left -= len(found[depth])
        return found

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
    """A chain that stops when unsure; nodes the budget grants beyond its depth are siblings."""

    traits = Traits(frozenset({Draw.POINT, Draw.DISTINCT}), Shape.TREE, memory=Memory.ENGINE)

    Config = SkipConfig

    def __init__(self, target: LanguageModel, config: SkipConfig | None = None) -> None:
        self.config = config or self.Config()
        self.layers = SomeLayers(target, self.config)
        super().__init__(self.layers)

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        return SiblingGrowth(row, depth, budget.nodes, self.config.stop_below)

    def observe(self, step: Step) -> None:
        super().observe(step)
        self.layers.learn(step.rows)

    def report(self) -> str:
        """What the search took and found."""
        search = self.layers.latest
        if not search.tries:
            return ""
        return (
            f"the search for layers to skip took {search.cost.seconds:.1f} s and {search.tries} "
            f"tries{', and has ended' if search.done else ''}; the set in use guessed "
            f"{search.best:.0%} of the {search.config.window} tokens it was judged by"
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

    def learn(self, rows: Rows) -> None:
        """A round of these rows went by: searches may try another set on what was written."""
        followers: dict[SkipSearch, list[DecodeState]] = {}
        for row in rows:
            followers.setdefault(self.search(row), []).append(row)
        for search, written in followers.items():
            if search.round_passed(written):
                self.latest = search

    def open(self, row: DecodeState, features: Features | None) -> bool:
        if row.repeatable:
            row.private[self] = SkipSearch(self.view, self.config)
        return True

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
