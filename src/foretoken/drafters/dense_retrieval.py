"""Continue the way texts continued where the target was in a similar state (keys as in kNN language
models, arXiv 1911.00172, made small as in arXiv 2505.00105).

The state is the hidden layer after which the last committed token was said; it comes with the
target's own scores, so looking up costs no forward. What followed the nearest states becomes a
trie, whose most weighty nodes are drafted. The target verifies, so small keys can cost accepted
tokens and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from foretoken.datastore.continuations import beginnings
from foretoken.datastore.dense import KeyStore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.drafters.rows import RowDrafter
from foretoken.errors import ConfigError
from foretoken.trees.build import grafted, root
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    KeepGoing,
    LanguageModel,
    Scores,
    Verdict,
)


class DenseRetrieval(RowDrafter):
    """A trie of what followed the nearest states."""

    trees = True

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
        if settings.neighbours < 1 or settings.sharpness < 0.0:
            raise ConfigError(
                f"neighbours={settings.neighbours}, sharpness={settings.sharpness} was asked for.",
                "neighbours is 1 or more, sharpness 0 (all weigh alike) or more.",
                "pass for instance neighbours=32, sharpness=20.",
            )
        self.store = KeyStore(settings.keys)
        for name, here, there in (
            ("tokens", self.store.vocabulary.size, target.vocab_size),
            ("hidden numbers", self.store.hidden_size, target.hidden_size),
        ):
            if here > there or (name != "tokens" and here != there):
                raise ConfigError(
                    f"the keys {settings.keys} were asked for with a target of {there} {name}.",
                    f"they were made with a target of {here}.",
                    "make keys with this target: foretoken datastore build --dense.",
                )
        self.taps = (self.store.contents.tap,)

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        row.draft = None if seen is None or len(seen) == 0 else seen[-1, 0].clone()

    def propose_one(self, row: DecodeState, budget: Budget, keep_going: KeepGoing) -> Draft:
        top = root(row.tokens[-1])
        if row.draft is None:  # a prompt of one token: nothing was said after any state yet
            return Draft(top, Draw.POINT)
        found = self.store.find(
            row.draft,
            row.tokens[-1],
            min(budget.depth, budget.nodes),
            self.config.neighbours,
            self.config.sharpness,
        )
        if found is None:
            return Draft(top, Draw.POINT)
        end = self.store.vocabulary.size
        best = beginnings(found, budget.nodes, end, row.params.eos)
        tree, _ = grafted(top, best.tokens, best.parents)
        return Draft(tree, Draw.POINT)

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        """Keep the state after which the newest token was said."""
        for row, score, verdict in zip(rows, scores, verdicts, strict=True):
            assert score.hidden is not None, "the target shows the layer that was asked for"
            row.draft = score.hidden[verdict.path[-1] if verdict.path else 0, 0].clone()

    def check_words(self, words: Mapping[str, int]) -> None:
        """Refuse keys made with another tokenizer than the target's."""
        self.store.vocabulary.refuse_other(Vocabulary.of(words), self.config.keys)
