"""Continue the way texts continued where the target was in a similar state (keys as in kNN language
models, arXiv 1911.00172, made small as in arXiv 2505.00105).

The state is the hidden layer after which the last committed token was said; it comes with the
target's own scores, so looking up costs no forward. What followed the nearest states becomes a
trie, whose most weighty nodes are drafted. The target verifies, so small keys can cost accepted
tokens and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foretoken.contract import Features, LanguageModel
from foretoken.datastore.capture import check_layer
from foretoken.datastore.dense import KeyStore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.drafters.parts.datastore_source import drafted, foreign_by_size
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.errors import ConfigError, check_values
from foretoken.types import Budget, DecodeState, Draft, Layer, Shape, Step, Traits


class DenseRetrieval(RowDrafter):
    """A trie of what followed the nearest states."""

    traits = Traits(shape=Shape.TREE, context=1)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        keys: str | Path = ""  # folder of `foretoken datastore build --dense`; has to be given
        neighbours: int = 32  # nearest states whose continuations are read
        sharpness: float = 20.0  # how fast a neighbour's weight falls with its cosine

    def __init__(self, target: LanguageModel, config: Config | None = None) -> None:
        self.config = config or self.Config()
        settings = self.config
        if not str(settings.keys):
            raise ConfigError(
                "retrieval by states was asked for without keys.",
                "it looks states up in a folder, the option keys.",
                "make one (foretoken datastore build --dense) and pass keys=FOLDER.",
            )
        check_values(
            settings,
            ("neighbours", settings.neighbours >= 1, "1 or more"),
            ("sharpness", settings.sharpness >= 0.0, "0 (all weigh alike) or more"),
        )
        self.store = KeyStore(settings.keys)
        known, width, size = self.store.vocabulary, self.store.hidden_size, target.vocab_size
        self.end = min(known.size, size)  # ids from here on are no tokens
        for name, here, there, foreign in (
            ("tokens", known.size, size, foreign_by_size(known, size)),
            ("hidden numbers", width, target.hidden_size, width != target.hidden_size),
        ):
            if foreign:
                raise ConfigError(
                    f"the keys {settings.keys} were asked for with a target of {there} {name}.",
                    f"they were made with a target of {here}.",
                    "make keys with this target: foretoken datastore build --dense.",
                )
        check_layer(target, self.store.contents.tap)
        self.traits = replace(self.traits, taps=(Layer(self.store.contents.tap),))

    def start(self, row: DecodeState, seen: Features | None) -> None:
        if seen is not None and len(seen):
            row.private[self] = seen[-1, 0].clone()

    def propose_one(self, row: DecodeState, budget: Budget) -> Draft:
        found = None
        if self in row.private:  # not after a prompt of one token: nothing was said after any state
            found = self.store.find(
                row.private[self],
                row.tokens[-1],
                min(budget.depth, budget.nodes),
                self.config.neighbours,
                self.config.sharpness,
            )
        return drafted(row, found, budget.nodes, self.end)

    def observe(self, step: Step) -> None:
        """Keep the state after which the newest token was said."""
        seen = step.whole or step
        for row, score, verdict in zip(step.rows, seen.scores, seen.verdicts, strict=True):
            assert score.hidden is not None, "the target shows the layer that was asked for"
            row.private[self] = score.hidden[verdict.path[-1] if verdict.path else 0, 0].clone()

    def check_vocabulary(self, vocabulary: Mapping[str, int]) -> None:
        """Refuse keys made with another tokenizer than the target's."""
        self.store.vocabulary.refuse_other(Vocabulary.of(vocabulary), self.config.keys)
