"""The target guesses with some of its sublayers left out, found while it writes (SWIFT, arXiv
2410.06916).

The draft stops after a token it was not sure of, and the tree widens where it was not: siblings are
the next best tokens (POINT) at temperature 0, and further draws without replacement (DISTINCT)
above. How many siblings a node gets depends on tokens drawn before them only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.drafters.chains import Chain, ChainDrafter
from foretoken.drafters.skip_search import SearchRules, SkipSearch
from foretoken.errors import CapabilityError, check_values
from foretoken.lm.views import skips
from foretoken.types import DecodeState, Draft, Draw, LanguageModel, Scores, TokenTree, Verdict

# children of a node by how sure the draft was of the first: (sure above, greedy, sampled)
WIDTHS = ((0.95, 3, 1), (0.8, 5, 3), (0.5, 8, 5), (-1.0, 10, 10))


class LayerSet(ChainDrafter):
    """A chain that stops when unsure; nodes the budget grants beyond its depth are siblings."""

    trees = True
    draws = frozenset({Draw.POINT, Draw.DISTINCT})
    shared = True  # the set in use was found on other rows' texts too

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        skip_ratio: float = 0.45  # of the sublayers between the first and the last layer
        skip: tuple[int, ...] | None = None  # a set known to be good: nothing is searched
        stop_below: float = 0.8  # a draft ends with a token less sure than this
        window: int = 32  # first tokens of a text that a set is judged by
        search_interval: int = 1  # rounds between tries; 0: never
        bayes_interval: int = 0  # tries between those a Gaussian process suggests; 0: all random
        most_tries: int = 1000
        patience: int = 300  # tries in a row that find nothing better, then the search ends
        good_enough: float = 0.95  # it ends as well when the draft guesses this share
        seed: int = 1  # of the search

    def __init__(self, target: LanguageModel, config: Config | None = None) -> None:
        self.config = config = config or self.Config()
        self.view = skips(target)
        self.max_length = target.max_length
        check(config, self.view.units)
        searching = config.skip is None and config.search_interval > 0
        if searching and not self.view.searchable:
            raise CapabilityError(
                "a search for skipped layers was asked for with exact_bits=True.",
                "it reads tokens far from their own columns, and sums would change their order.",
                "pass skip=(...), a set found before, or search_interval=0, or drop exact_bits.",
            )
        rules = SearchRules(
            ratio=config.skip_ratio,
            window=config.window,
            interval=config.search_interval,
            bayes_interval=config.bayes_interval,
            most_tries=config.most_tries,
            patience=config.patience,
            good_enough=config.good_enough,
            seed=config.seed,
        )
        self.search = SkipSearch(self.view, rules, config.skip)

    def grow(self, chains: Sequence[Chain]) -> list[Tensor]:
        return self.view.grow(
            [chain.row for chain in chains],
            [chain.feed for chain in chains],
            [chain.above for chain in chains],
            self.search.skipped,
        )

    def go_on(self, chain: Chain, logits: Tensor) -> bool:
        """Not after a token that was unlikely before any sampling option; it stays drafted."""
        sure = float(logits.float().softmax(-1)[chain.tokens[-1]])
        chain.notes.append((sure, logits))
        return sure >= self.config.stop_below

    def draft(self, chain: Chain) -> Draft:
        """The chain and its siblings."""
        tokens, parents = [chain.row.tokens[-1]], [-1]
        laws: list[Tensor | None] = [None]
        beside = self.siblings(chain)
        above = 0
        for depth, token in enumerate(chain.tokens):
            if not chain.greedy:
                laws[above] = chain.laws[depth]
            children = [token, *beside[depth]]
            parents += [above] * len(children)
            above = len(tokens)
            tokens += children
            laws += [None] * len(children)
        tree = TokenTree(tuple(tokens), tuple(parents))
        if chain.greedy:
            return Draft(tree, Draw.POINT)
        return Draft(tree, Draw.DISTINCT, tuple(laws))

    def siblings(self, chain: Chain) -> list[list[int]]:
        """Further candidates beside each token of the chain, the least sure places first."""
        found: list[list[int]] = [[] for _ in chain.tokens]
        left = chain.nodes - chain.depth  # what the budget grants beyond a chain
        for depth in sorted(range(len(found)), key=lambda at: chain.notes[at][0]):
            sure, logits = chain.notes[depth]
            count = min(width(sure, chain.greedy) - 1, left)
            if count > 0 and chain.greedy:
                found[depth] = next_best(chain, logits, chain.tokens[depth], count)
            elif count > 0:
                found[depth] = drawn(chain, depth, count)
            left -= len(found[depth])
        return found

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        search = self.search
        if search.done:
            return
        search.rounds += 1
        if search.rounds % self.config.search_interval == 0:
            row = next((row for row in rows if search.wants(row)), None)
            if row is not None:
                search.step(row)

    def report(self) -> str:
        """What the search took and found."""
        search = self.search
        if not search.tries:
            return ""
        return (
            f"the search for layers to skip took {search.cost.seconds:.1f} s and {search.tries} "
            f"tries{', and has ended' if search.done else ''}; the set in use guessed "
            f"{search.best:.0%} of the {search.rules.window} tokens it was judged by"
        )


def width(sure: float, greedy: bool) -> int:
    """Children of a node whose first child the draft gave the probability `sure`."""
    for least, fixed, sampled in WIDTHS:
        if sure > least:
            return fixed if greedy else sampled
    raise AssertionError("a probability lies above -1")


def next_best(chain: Chain, logits: Tensor, taken: int, count: int) -> list[int]:
    """The `count` most likely tokens but the one taken, impossible ones left out."""
    scores = chain.row.warp.biased(logits)
    best = scores.topk(min(count + 1, len(scores)))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [t for value, t in pairs if t != taken and value > float("-inf")][:count]


def drawn(chain: Chain, depth: int, count: int) -> list[int]:
    """Up to `count` further draws without replacement from the law the token came from."""
    law = chain.laws[depth]
    assert law is not None
    left = law.clone()
    left[chain.tokens[depth]] = 0.0
    found: list[int] = []
    while len(found) < count and float(mass := left.sum()) > 0.0:
        found.append(chain.row.coins.draw(left / mass))
        left[found[-1]] = 0.0
    return found


def check(config: LayerSet.Config, units: int) -> None:
    """ConfigError for numbers that make no sense."""
    wrong = [unit for unit in config.skip or () if not 0 <= unit < units]
    check_values(
        config,
        ("skip_ratio", 0.0 <= config.skip_ratio < 1.0, "0 or more, below 1"),
        ("skip", not wrong, f"sublayers from 0 to {units - 1}"),
        ("window", config.window >= 1, "1 or more"),
        ("search_interval", config.search_interval >= 0, "0 (never) or more"),
        ("bayes_interval", config.bayes_interval >= 0, "0 (never) or more"),
    )
