"""Where texts are looked up, a datastore above all, and drafts made of what is found there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foretoken.datastore.continuations import Continuations, beginnings
from foretoken.datastore.segment import DEPTH
from foretoken.datastore.store import Datastore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.errors import ConfigError, check_values
from foretoken.trees.build import undrafted
from foretoken.types import Budget, DecodeState, Draft, Draw, TokenTree


@dataclass(frozen=True, kw_only=True, slots=True)
class DatastoreConfig:
    """Where to look texts up, and how."""

    datastore: str | Path = ""  # folder of `foretoken datastore build`; has to be given
    max_match: int = 16  # longest end of the context looked up; paper default
    min_match: int = 1  # shortest; the paper stops at 2
    occurrences: int = 256  # read per segment, evenly spaced; the paper reads the first 5000


class Source:
    """Base: where a text's last tokens are looked up, and what followed them there."""

    end: int  # ids from here on are no tokens

    def __init__(self, config: DatastoreConfig) -> None:
        self.config = config
        fits = 1 <= config.min_match <= config.max_match
        check_values(
            config,
            ("min_match", fits, f"1 to max_match, which is {config.max_match}"),
            ("occurrences", config.occurrences >= 1, "1 or more"),
        )

    def look_up(self, row: DecodeState, budget: Budget) -> Continuations | None:
        """What followed the longest end of the row's text that occurs."""
        raise NotImplementedError

    def check_vocabulary(self, vocabulary: Mapping[str, int]) -> None:
        """Refuse ids of another tokenizer than the target's."""


class DatastoreSource(Source):
    """A datastore opened for a target."""

    def __init__(self, config: DatastoreConfig, vocab_size: int) -> None:
        super().__init__(config)
        most = f"at most {DEPTH}, to which a datastore's texts are sorted"
        check_values(config, ("max_match", config.max_match <= DEPTH, most))
        if not str(config.datastore):
            raise ConfigError(
                "a method that looks things up was asked for without a datastore.",
                "it guesses from texts kept in a folder, the option datastore.",
                "build one (foretoken datastore build) and pass datastore=FOLDER.",
            )
        self.store = Datastore(config.datastore)
        known = self.store.vocabulary
        self.end = min(known.size, vocab_size)
        if foreign_by_size(known, vocab_size):
            raise ConfigError(
                f"the datastore {config.datastore} was asked for with a target of {vocab_size} "
                "tokens.",
                f"it was made for {known.size}: some of its ids are none of the target's.",
                "build a datastore with the target's own tokenizer: foretoken datastore build.",
            )

    def look_up(self, row: DecodeState, budget: Budget) -> Continuations | None:
        return self.store.find(
            row.tokens,
            min(budget.depth, budget.nodes),
            least=self.config.min_match,
            most=self.config.max_match,
            limit=self.config.occurrences,
        )

    def check_vocabulary(self, vocabulary: Mapping[str, int]) -> None:
        self.store.vocabulary.refuse_other(Vocabulary.of(vocabulary), self.config.datastore)


def foreign_by_size(known: Vocabulary, vocab_size: int) -> bool:
    """Whether ids are of another target because some are none of this one's.

    Ids of a tokenizer are not: it may have more than its model scores, and what they mean is
    compared later (`check_vocabulary`). Of ids that no tokenizer explains there is nothing else.
    """
    return known.size > vocab_size and known == Vocabulary.of_ids(known.size)


def drafted(row: DecodeState, found: Continuations | None, nodes: int, end: int) -> Draft:
    """The most frequent beginnings of what was found, none behind an id from `end` on."""
    if found is None:
        return undrafted(row)
    best = beginnings(found, nodes, end, row.params.eos)
    tree = TokenTree((row.tokens[-1], *best.tokens), (-1, *(at + 1 for at in best.parents)))
    return Draft(tree, Draw.POINT)
