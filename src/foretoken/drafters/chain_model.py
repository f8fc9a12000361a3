"""A draft model guesses a chain, token by token (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.drafters.chains import Chain, ChainDrafter
from foretoken.types import DecodeState, Draft, LanguageModel, Scores, Verdict


class ChainModel(ChainDrafter):
    """One draft forward per depth over all rows that still draft."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        pass

    def __init__(self, draft_lm: LanguageModel, config: Config | None = None) -> None:
        self.lm = self.hidden_from = draft_lm
        self.max_length = draft_lm.max_length
        self.config = config or self.Config()

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        # A prompt beyond the draft model's positions is decoded plainly: `allowed` stays at zero.
        if self.lm.max_length is None or len(row.tokens) <= self.lm.max_length:
            self.lm.prefill(row)
        row.draft = 0  # nodes of the draft model's open tree; zero: none is open

    def grow(self, chains: Sequence[Chain]) -> list[Tensor]:
        return self.lm.grow(
            [chain.row for chain in chains],
            [chain.feed for chain in chains],
            [chain.above for chain in chains],
        )

    def grow_scores(self, chains: Sequence[Chain], taps: tuple[int, ...]) -> list[Scores]:
        return self.lm.grow_scores(
            [chain.row for chain in chains],
            [chain.feed for chain in chains],
            [chain.above for chain in chains],
            taps,
        )

    def drafted(self, chain: Chain) -> None:
        chain.row.draft = chain.fed

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        opened, paths = [], []
        for row, verdict in zip(rows, verdicts, strict=True):
            if row.draft and row.finish is None:
                opened.append(row)
                # In a chain, node i is the i-th node fed; the last one drafted was not fed.
                paths.append(verdict.path[: row.draft - 1])
                row.draft = 0
        if opened:
            self.lm.commit(opened, paths)

    def finish(self, row: DecodeState) -> None:
        self.lm.free([row])
