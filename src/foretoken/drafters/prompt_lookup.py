"""Continue the way the last n-gram continued before; no second model.

github.com/apoorvumang/prompt-lookup-decoding, with four differences: an index of n-grams grows
with the text instead of a search through it, the latest earlier occurrence wins, a continuation
that runs into the end of the text copies itself on, so that a loop of any period is followed, and
where tokens have prices the copy ends where it is no longer likely enough.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from foretoken.contract import Features
from foretoken.drafters.parts.chances import of_paths
from foretoken.drafters.parts.look_up import LookUp
from foretoken.drafters.parts.match_odds import EDGES, MatchOdds, least_copied
from foretoken.errors import check_values
from foretoken.native.look_ups import copied
from foretoken.trees.build import Trie
from foretoken.trees.guesses import Guesses
from foretoken.types import Budget, DecodeState, Memory, Shape, Step, Traits


class PromptLookup(LookUp):
    """A chain from the latest match, or a trie of the latest few."""

    traits = Traits(memory=Memory.ENGINE, prices=True)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        max_ngram: int = 3  # longest suffix looked up, tried first; paper default
        min_ngram: int = 1  # shortest suffix looked up
        matches: int = 1  # earlier continuations drafted together; above 1 they form a tree

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        settings = self.config
        fits = 1 <= settings.min_ngram <= settings.max_ngram
        check_values(
            settings,
            ("min_ngram", fits, f"1 to max_ngram, which is {settings.max_ngram}"),
            ("matches", settings.matches >= 1, "1 (a chain) or more (a tree)"),
        )
        if settings.matches > 1:
            self.traits = replace(self.traits, shape=Shape.TREE)
        self.odds, self.cut = MatchOdds(), Guesses()

    def start(self, row: DecodeState, seen: Features | None) -> None:
        index = NgramIndex(self.config.min_ngram, self.config.max_ngram)
        row.private[self] = _LookedUp(index, array("q", row.params.eos))

    def look_up(self, row: DecodeState, budget: Budget) -> Guesses:
        state: _LookedUp = row.private[self]
        found, index = state.found, state.index
        depth = min(budget.depth, budget.nodes)
        if depth <= 0:
            found.clear(row.tokens[-1])
            return found
        index.grow(row.tokens)
        starts = list(index.matches(row.tokens, self.config.matches))
        least, greedy = least_copied(budget) or 0.0, row.warp.greedy
        if not copied(
            found, index.text, len(row.tokens), starts, depth, budget.nodes, least,
            self.odds.table, greedy, state.ends,
        ):  # fmt: skip
            copies = Copies(row, budget, self.odds)
            for start in starts:
                path = continuation(row.tokens, start, depth, row.params.eos)
                copies.add(path, common(row.tokens, start))
            copies.write(found)
        return found

    def observe(self, step: Step) -> None:
        for row, said in zip(step.rows, step.emitted, strict=True):
            if not row.rehearsal:
                self.odds.all_tried(row.private[self].found, said, row.warp.greedy)


class Copies:
    """A tree of continuations under way, and of every node its chance below its parent."""

    def __init__(self, row: DecodeState, budget: Budget, odds: MatchOdds) -> None:
        self.trie = Trie(row.tokens[-1])
        self.chances, self.matched = [1.0], [0]  # of each node; tokens that matched before it
        self.nodes, self.least = budget.nodes, least_copied(budget) or 0.0
        self.odds, self.greedy = odds, row.warp.greedy

    def add(self, path: Sequence[int], matched: int) -> None:
        """A continuation behind a match so long, as far as it is likely enough to pay."""
        node, reached = 0, 1.0
        for length, token in enumerate(path, matched):
            chance = self.odds.chance(length, 1.0, self.greedy)
            reached *= chance
            if (node, token) not in self.trie.known:
                if len(self.trie) > self.nodes or reached < self.least:
                    return
                self.chances.append(chance)
                self.matched.append(length)
            node = self.trie.child(node, token)

    def write(self, found: Guesses) -> None:
        """Marks are the lengths that matched; a copy is all that followed."""
        paths = of_paths(self.trie.parents, self.chances)
        found.fill(self.trie.tree(), paths, self.matched, [1.0] * len(self.trie))


def common(tokens: Sequence[int], start: int) -> int:
    """How many tokens before `start` are those at the end of the text, as far as is told apart."""
    length, furthest = 1, min(EDGES[-1], start)
    while length < furthest and tokens[start - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def continuation(
    tokens: Sequence[int], start: int, depth: int, eos: frozenset[int] = frozenset()
) -> list[int]:
    """`depth` tokens from `start` on, the copy itself included; nothing follows an end token."""
    size = len(tokens)
    path: list[int] = []
    for at in range(start, start + depth):
        token = tokens[at] if at < size else path[at - size]
        path.append(token)
        if token in eos:
            break
    return path


@dataclass(slots=True)
class _LookedUp:
    """What is known of one row."""

    index: NgramIndex
    ends: array[int]  # tokens that nothing follows
    found: Guesses = field(default_factory=Guesses)  # for the step under way


@dataclass(slots=True)
class NgramIndex:
    """Where each n-gram of a growing text ended; a new token costs the same at any length."""

    shortest: int
    longest: int
    size: int = 0  # ends 1..size are in the index
    text: array[int] = field(default_factory=lambda: array("q"))  # the row's, for C
    latest: dict[tuple[int, ...], int] = field(default_factory=dict)
    # previous[n][end]: the end of the same n-gram before `end`, 0 for none
    previous: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.previous = {n: [0] for n in range(self.shortest, self.longest + 1)}

    def grow(self, tokens: Sequence[int]) -> None:
        """Take in all n-grams that end before the text does: the suffix must not find itself."""
        for end in range(self.size + 1, len(tokens)):
            for n, links in self.previous.items():
                if n <= end:
                    gram = tuple(tokens[end - n : end])
                    links.append(self.latest.get(gram, 0))
                    self.latest[gram] = end
                else:
                    links.append(0)
        self.size = max(self.size, len(tokens) - 1)
        self.text.extend(tokens[len(self.text) :])

    def matches(self, tokens: Sequence[int], limit: int) -> Iterator[int]:
        """Ends of earlier occurrences of the suffix: longest n-grams first, then latest first."""
        found: set[int] = set()
        for n in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            end = self.latest.get(tuple(tokens[-n:]), 0)
            while end and len(found) < limit:
                if end not in found:
                    found.add(end)
                    yield end
                end = self.previous[n][end]
            if len(found) >= limit:
                return
