"""What row-by-row drafters share: `propose` from `propose_one`, and nothing to remember."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

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


class RowDrafter:
    """Base of drafters that treat each row alone; override `propose_one` and what you need."""

    draws: frozenset[Draw] = frozenset({Draw.POINT})
    taps: tuple[int, ...] = ()
    trees = False
    valued = False
    sparing = False
    arms = 1
    memoryless = False
    hidden_from: LanguageModel | None = None
    shared = False

    def fitting(self, depth: int | None, nodes: int | None) -> Budget | None:
        return None

    def propose_one(self, row: DecodeState, budget: Budget, keep_going: KeepGoing) -> Draft:
        raise NotImplementedError

    def propose(
        self, rows: Sequence[DecodeState], budgets: Sequence[Budget], keep_going: KeepGoing
    ) -> list[Draft]:
        return [self.propose_one(r, b, keep_going) for r, b in zip(rows, budgets, strict=True)]

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        return None

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        return None

    def finish(self, row: DecodeState) -> None:
        return None
