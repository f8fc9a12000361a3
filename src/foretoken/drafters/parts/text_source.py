"""The row's own text as a source of continuations, looked up as a datastore would be."""

from __future__ import annotations

import numpy as np

from foretoken.datastore.continuations import Continuations, in_order
from foretoken.drafters.parts.datastore_source import DatastoreConfig, Source
from foretoken.drafters.parts.suffix_index import SuffixIndex
from foretoken.drafters.prompt_lookup import continuation
from foretoken.types import Budget, DecodeState


class TextSource(Source):
    """What followed the longest end of a row's text where it stood earlier in the same text."""

    def __init__(self, config: DatastoreConfig, vocab_size: int) -> None:
        super().__init__(config)
        self.end = vocab_size

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
        paths = np.full((len(places), depth), self.end, np.int64)  # that id is no token
        for path, place in zip(paths, places, strict=True):
            after = continuation(row.tokens, place, depth, row.params.eos)
            path[: len(after)] = after
        ordered, weights = in_order(paths, np.ones(len(places)))
        return Continuations(longest, ordered, weights, float(len(places)))
