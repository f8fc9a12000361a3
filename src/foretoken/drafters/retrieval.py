"""Continue the way a datastore of texts continued (REST, arXiv 2311.08252); no second model.

The longest end of the context that occurs in the datastore is looked up, what followed it there
becomes a trie, and its most frequent beginnings are drafted. Where we differ: a beginning's parent
is kept whatever the ties, documents end where they end, and the rule is exact (the released one
draws a token per candidate and position, which accepts too much).
"""

from __future__ import annotations

from collections.abc import Mapping

from foretoken.contract import LanguageModel
from foretoken.drafters.parts.datastore_source import DatastoreConfig, DatastoreSource, drafted
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.types import Budget, DecodeState, Draft, Memory, Shape, Traits


class Retrieval(RowDrafter):
    """A trie of what followed the longest match, its most frequent nodes first."""

    traits = Traits(shape=Shape.TREE, memory=Memory.NOTHING)

    Config = DatastoreConfig

    def __init__(self, target: LanguageModel, config: DatastoreConfig | None = None) -> None:
        self.config = config or self.Config()
        self.source = DatastoreSource(self.config, target.vocab_size)

    def propose_one(self, row: DecodeState, budget: Budget) -> Draft:
        return drafted(row, self.source.look_up(row, budget), budget.nodes, self.source.end)

    def check_vocabulary(self, vocabulary: Mapping[str, int]) -> None:
        """Refuse a datastore made with another tokenizer than the target's."""
        self.source.check_vocabulary(vocabulary)
