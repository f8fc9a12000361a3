"""What drafters that look things up share: a datastore opened for a target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from foretoken.datastore.continuations import Beginnings, Continuations, beginnings
from foretoken.datastore.store import Datastore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.errors import ConfigError
from foretoken.types import DecodeState


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

    def beginnings(self, row: DecodeState, found: Continuations, nodes: int) -> Beginnings:
        """The most frequent beginnings of what was found, none behind an end token."""
        return beginnings(found, nodes, self.store.vocabulary.size, row.params.eos)

    def check_words(self, words: Mapping[str, int]) -> None:
        self.store.vocabulary.refuse_other(Vocabulary.of(words), self.folder)


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
