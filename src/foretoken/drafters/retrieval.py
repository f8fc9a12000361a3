"""Continue the way a datastore of texts continued (REST, arXiv 2311.08252); no second model.

The longest end of the context that occurs in the datastore is looked up, what followed it there
becomes a trie, and its most frequent beginnings are drafted. Where we differ: a beginning's parent
is kept whatever the ties, documents end where they end, and the rule is exact (the released one
draws a token per candidate and position, which accepts too much).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foretoken.drafters.rows import RowDrafter
from foretoken.drafters.source import Source, check_matching
from foretoken.trees.build import grafted, root
from foretoken.types import Budget, DecodeState, Draft, Draw, KeepGoing, LanguageModel


class Retrieval(RowDrafter):
    """A trie of what followed the longest match, its most frequent nodes first."""

    trees = True
    memoryless = True

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        datastore: str | Path = ""  # folder of `foretoken datastore build`; has to be given
        max_match: int = 16  # longest end of the context looked up; paper default
        min_match: int = 1  # shortest; the paper stops at 2
        occurrences: int = 256  # read per segment, evenly spaced; the paper reads the first 5000

    def __init__(self, target: LanguageModel, config: Config | None = None) -> None:
        self.config = config or self.Config()
        settings = self.config
        check_matching(settings.min_match, settings.max_match, settings.occurrences)
        self.source = Source(settings.datastore, target.vocab_size)

    def propose_one(self, row: DecodeState, budget: Budget, keep_going: KeepGoing) -> Draft:
        settings = self.config
        depth = min(budget.depth, budget.nodes)
        found = self.source.store.find(
            row.tokens,
            depth,
            least=settings.min_match,
            most=settings.max_match,
            limit=settings.occurrences,
        )
        if found is None:
            return Draft(root(row.tokens[-1]), Draw.POINT)
        best = self.source.beginnings(row, found, budget.nodes)
        tree, _ = grafted(root(row.tokens[-1]), best.tokens, best.parents)
        return Draft(tree, Draw.POINT)

    def check_words(self, words: Mapping[str, int]) -> None:
        """Refuse a datastore made with another tokenizer than the target's."""
        self.source.check_words(words)
