"""The row's own text as a source of continuations, looked up as a datastore would be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from foretoken.datastore.continuations import Beginnings, Continuations, beginnings, in_order
from foretoken.drafters.parts.datastore_source import DatastoreConfig
from foretoken.drafters.parts.suffix_index import SuffixIndex
from foretoken.drafters.prompt_lookup import continuation
from foretoken.errors import check_values
from foretoken.types import Budget, DecodeState


class ContinuationSource(Protocol):
    """Where a text's last tokens are looked up, and what followed them there."""

    def look_up(self, row: DecodeState, budget: Budget) -> Continuations | None: ...
    def beginnings(self, row: DecodeState, found: Continuations, nodes: int) -> Beginnings: ...
    def check_vocabulary(self, vocabulary: Mapping[str, int]) -> None: ...
    def forget(self, row: DecodeState) -> None: ...


class TextSource:
    """What followed the longest end of a row's text where it stood earlier in the same text."""

    def __init__(self, config: DatastoreConfig, vocab_size: int) -> None:
        self.config, self.vocab_size = config, vocab_size
        fits = 1 <= config.min_match <= config.max_match
        check_values(
            config,
            ("min_match", fits, f"1 to max_match, which is {config.max_match}"),
            ("occurrences", config.occurrences >= 1, "1 or more"),
        )

    def look_up(self, row: DecodeState, budget: Budget) -> Continuations | None:
        index: SuffixIndex = row.private.setdefault(self, SuffixIndex())
        index.extend(row.tokens[len(index) :])
        config, depth = self.config, min(budget.depth, budget.nodes)
        context = row.tokens[-config.max_match :]
        found = index.matches(context, config.max_match, config.occurrences)
        longest = max((length for _, length in found), default=0)
        if longest < config.min_match or depth <= 0:
            return None
        places = [place for place, length in found if length == longest]
        paths = np.full((len(places), depth), self.vocab_size, np.int64)  # that id is no token
        for path, place in zip(paths, places, strict=True):
            after = continuation(row.tokens, place, depth, row.params.eos)
            path[: len(after)] = after
        ordered, weights = in_order(paths, np.ones(len(places)))
        return Continuations(longest, ordered, weights, float(len(places)))

    def beginnings(self, row: DecodeState, found: Continuations, nodes: int) -> Beginnings:
        """The most frequent beginnings of what was found, none behind an end token."""
        return beginnings(found, nodes, self.vocab_size, row.params.eos)

    def check_vocabulary(self, vocabulary: Mapping[str, int]) -> None:
        """A text's own ids are right in any tokenizer."""

    def forget(self, row: DecodeState) -> None:
        row.private.pop(self, None)
