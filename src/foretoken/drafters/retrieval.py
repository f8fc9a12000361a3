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

from foretoken.datastore.continuations import Beginnings, Continuations, beginnings
from foretoken.datastore.store import Datastore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.drafters.rows import RowDrafter
from foretoken.errors import ConfigError
from foretoken.trees.build import root
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    KeepGoing,
    LanguageModel,
    TokenTree,
)


class Retrieval(RowDrafter):
    """A trie of what followed the longest match, its most frequent nodes first."""

    trees = True

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
        return Draft(self.source.tree(row, found, budget.nodes), Draw.POINT)

    def check_words(self, words: Mapping[str, int]) -> None:
        """Refuse a datastore made with another tokenizer than the target's."""
        self.source.check_words(words)


class Source:
    """A datastore opened for a target."""

    def __init__(self, folder: str | Path, vocab_size: int) -> None:
        if not str(folder):
            raise ConfigError(
                "a method that looks things up was asked for without a datastore.",
                "it guesses from texts kept in a folder, the option datastore.",
                "build one (foretoken datastore build) and pass datastore=FOLDER.",
            )
        self.folder = folder
        self.store = Datastore(folder)
        if self.store.vocabulary.size > vocab_size:
            raise ConfigError(
                f"the datastore {folder} was asked for with a target of {vocab_size} tokens.",
                f"it was made for {self.store.vocabulary.size}: some of its ids are none of the "
                "target's.",
                "build a datastore with the target's own tokenizer: foretoken datastore build.",
            )

    def tree(self, row: DecodeState, found: Continuations, nodes: int) -> TokenTree:
        """The most frequent beginnings below the row's last token."""
        return as_tree(row.tokens[-1], self.beginnings(row, found, nodes))

    def beginnings(self, row: DecodeState, found: Continuations, nodes: int) -> Beginnings:
        return beginnings(found, nodes, self.store.vocabulary.size, row.params.eos)

    def check_words(self, words: Mapping[str, int]) -> None:
        self.store.vocabulary.refuse_other(Vocabulary.of(words), self.folder)


def as_tree(token: int, found: Beginnings) -> TokenTree:
    """Beginnings below a root."""
    parents = tuple(parent + 1 for parent in found.parents)  # the root takes number 0
    return TokenTree((token, *found.tokens), (-1, *parents))


def check_matching(least: int, most: int, occurrences: int) -> None:
    """Refuse lengths that cannot be looked up."""
    if not 1 <= least <= most:
        raise ConfigError(
            f"min_match={least}, max_match={most} was asked for.",
            "1 <= min_match <= max_match.",
            "pass for instance min_match=1, max_match=16.",
        )
    if occurrences < 1:
        raise ConfigError(
            f"occurrences={occurrences} was asked for.",
            "occurrences is 1 or more.",
            "pass occurrences=256 or leave it out.",
        )
