"""Continue the way the last n-gram continued before; no second model.

github.com/apoorvumang/prompt-lookup-decoding, with three differences: an index of n-grams grows
with the text instead of a search through it, the latest earlier occurrence wins, and a continuation
that runs into the end of the text copies itself on, so that a loop of any period is followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from foretoken.contract import Features
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.errors import check_values
from foretoken.trees.build import from_paths, undrafted
from foretoken.types import Budget, DecodeState, Draft, Draw, Memory, Shape, Traits


class PromptLookup(RowDrafter):
    """A chain from the latest match, or a trie of the latest few."""

    traits = Traits(memory=Memory.NOTHING)

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

    def start(self, row: DecodeState, seen: Features | None) -> None:
        row.private[self] = NgramIndex(self.config.min_ngram, self.config.max_ngram)

    def propose_one(self, row: DecodeState, budget: Budget) -> Draft:
        depth, nodes = min(budget.depth, budget.nodes), budget.nodes
        index: NgramIndex = row.private[self]
        index.grow(row.tokens)
        if depth <= 0:
            return undrafted(row)
        paths: list[list[int]] = []
        seen: set[tuple[int, ...]] = set()
        for start in index.matches(row.tokens, self.config.matches):
            path = continuation(row.tokens, start, depth, row.params.eos)
            fresh = [i for i in range(1, len(path) + 1) if tuple(path[:i]) not in seen][:nodes]
            if fresh:
                path = path[: fresh[-1]]
                nodes -= len(fresh)
                paths.append(path)
                seen.update(tuple(path[:i]) for i in fresh)
        return Draft(from_paths(row.tokens[-1], paths), Draw.POINT)


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
class NgramIndex:
    """Where each n-gram of a growing text ended; a new token costs the same at any length."""

    shortest: int
    longest: int
    size: int = 0  # ends 1..size are in the index
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
