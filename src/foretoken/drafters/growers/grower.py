"""Trees grown with a draft model, one of its forwards per level over all rows that still draft.

What every grower shares is here: rows that the model cannot take are decoded plainly, no draft
outruns its positions, nothing follows an end token, and of an open tree the model keeps what the
target took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from foretoken.contract import (
    BlockModel,
    DraftModel,
    Features,
    LanguageModel,
    ReadsLate,
    ReadsTexts,
    Shallow,
    StoppingRule,
    Views,
)
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.trees.build import undrafted
from foretoken.types import Budget, DecodeState, Draft, Rows, Scores, Step, Verdict

UNREAD = 32  # tokens whose hidden states wait at most: more in one forward are hardly cheaper each


class Growth:
    """One row's tree under way."""

    row: DecodeState
    complete = False  # without the model being asked level by level

    def feed(self) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens to be scored next, and their parents in the model's open tree."""
        raise NotImplementedError

    def take(self, score: Scores, stop: StoppingRule | None) -> bool:
        """Add what follows from the scores of what was just fed; False: the tree is complete."""
        raise NotImplementedError

    def draft(self) -> Draft:
        """The tree as candidates."""
        raise NotImplementedError

    def fed(self, path: Sequence[int]) -> list[int] | None:
        """Where nodes of the draft lie in the model's open tree, the root and those that were never
        fed aside; None: no tree is open.
        """
        raise NotImplementedError

    def judged(self, draft: Draft, verdict: Verdict) -> None:
        """Learn from what became of the draft, which others may have pruned."""
        return None


@dataclass(slots=True)
class Opened:
    """What is kept of a row that the model took in."""

    growth: Growth | None = None  # proposed and not judged yet
    # Of tokens committed while no tree was open: the model reads them when it is asked next, so
    # that one that does not pay costs next to nothing.
    unread: list[Features] = field(default_factory=list)


class ModelDrafter(RowDrafter):
    """Base of drafters that make trees of what a model guesses, and let it follow the text."""

    view: LanguageModel  # set where the model is part of the target: the engine scores through it
    longest: int | None = None  # sequence that the model's positions allow
    deepest: int | None = None  # level that the model guesses

    def __init__(self, model: DraftModel | BlockModel) -> None:
        self.source = model
        self.reads_late = isinstance(model, ReadsLate) and model.reads_late
        self.reader = model if isinstance(model, ReadsTexts) else None
        self.traits = replace(self.traits, taps=model.taps, context=model.context)
        if isinstance(model, Views):
            self.view = model.view

    def opened(self, row: DecodeState) -> Opened:
        """What to keep of a row from its start on."""
        return Opened()

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        """The tree of a row, of at most `depth` levels and of one at least; None drafts nothing."""
        raise NotImplementedError

    def grow(self, growths: Sequence[Growth], stop: StoppingRule | None) -> None:
        """Let trees that are not complete grow until they are."""
        raise NotImplementedError

    def undrafted(self, row: DecodeState) -> Draft:
        """The draft of a row that none is made for."""
        return undrafted(row)

    def follow(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        """Tell the model which nodes of its open trees stand."""
        raise NotImplementedError

    def start(self, row: DecodeState, seen: Features | None) -> None:
        if self.source.open(row, seen):
            row.private[self] = self.opened(row)

    def begun(self, row: DecodeState, budget: Budget) -> Growth | None:
        """The row's new tree, if it gets one."""
        state: Opened | None = row.private.get(self)
        if state is None:
            return None
        depth = self.reach(row, budget)
        state.growth = growth = self.begin(row, depth, budget) if depth > 0 else None
        return growth

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]:
        if self.reads_late:
            pairs = zip(rows, budgets, strict=True)
            self.catch_up([row for row, budget in pairs if self.reach(row, budget) > 0])
        growths = [self.begun(row, budget) for row, budget in zip(rows, budgets, strict=True)]
        self.grow([one for one in growths if one is not None and not one.complete], stop)
        return [
            self.undrafted(row) if one is None else one.draft()
            for row, one in zip(rows, growths, strict=True)
        ]

    def reach(self, row: DecodeState, budget: Budget) -> int:
        """Levels that may be drafted; nodes of the last one are never fed."""
        if row.private.get(self) is None:
            return 0
        if row.tokens[-1] in row.params.eos and len(row.tokens) > row.prompt_len:
            return 0  # of a row whose last tokens nobody has judged yet
        depth = min(budget.depth, budget.nodes)
        if depth > 0 and self.read_in_vain(row, budget):
            return 0
        if self.deepest is not None:
            depth = min(depth, self.deepest)
        if self.longest is not None:
            depth = min(depth, self.longest - len(row.tokens) + 1)
        return depth

    def read_in_vain(self, row: DecodeState, budget: Budget) -> bool:
        """Whether the model would read a text for longer than what is left of it takes without a
        draft. Seconds never come again, so they decide nothing where a seed has to repeat its text.
        """
        prices = budget.prices
        if self.reader is None or prices is None or prices.level <= 0.0 or row.repeatable:
            return False
        return prices.second * self.reader.to_read(row) > row.room * prices.step

    def observe(self, step: Step) -> None:
        rows: list[DecodeState] = []
        paths: list[Sequence[int] | None] = []
        features: list[Features | None] = []
        seen = step.whole or step
        texts = map(_of_text, seen.scores, seen.verdicts)
        for row, draft, verdict, text in zip(
            step.rows, step.drafts, step.verdicts, texts, strict=True
        ):
            state: Opened | None = row.private.get(self)
            if state is None or row.finish is not None:
                continue
            growth = state.growth
            path = None
            if growth is not None:
                state.growth = None
                if not row.rehearsal:
                    growth.judged(draft, verdict)
                origin = draft.origin
                path = growth.fed(
                    verdict.path if origin is None else [origin[node] for node in verdict.path]
                )
            if path is None and text is not None and self.reads_late:
                state.unread.append(text)
            elif path is not None or text is not None:
                rows.append(row)
                paths.append(path)
                features.append(text)
        if rows:
            self.follow(rows, paths, features)
        if self.reads_late:
            self.catch_up(step.rows, UNREAD)

    def catch_up(self, rows: Rows, most: int = 1) -> None:
        """Let the model read what waits of rows, where that is so many tokens at least.

        Rows that it failed to read, or read in part, are written without it.
        """
        late = [
            (row, state)
            for row in rows
            if (state := row.private.get(self)) is not None
            and row.finish is None
            and sum(map(len, state.unread)) >= most
        ]
        if late:
            try:
                texts = [torch.cat(state.unread) for _, state in late]
                self.follow([row for row, _ in late], [None] * len(late), texts)
            except BaseException:
                for row, _ in late:
                    self.finish(row)
                raise
            for _, state in late:
                state.unread = []

    def finish(self, row: DecodeState) -> None:
        row.private.pop(self, None)
        self.source.close(row)


class Grower(ModelDrafter):
    """Base of the growers: override `begin`, which makes the `Growth` of a row."""

    def __init__(self, model: DraftModel, config: Any = None) -> None:
        super().__init__(model)
        self.model = model
        self.longest = model.max_length
        self.deepest = model.deepest if isinstance(model, Shallow) else None

    def grow(self, growths: Sequence[Growth], stop: StoppingRule | None) -> None:
        taps = () if stop is None else stop.taps
        growing = growths
        while growing:
            tokens, parents = zip(*[one.feed() for one in growing], strict=True)
            scores = self.model.grow([one.row for one in growing], tokens, parents, taps)
            growing = [
                one for one, score in zip(growing, scores, strict=True) if one.take(score, stop)
            ]

    def follow(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        self.model.keep(rows, paths, features)


def _of_text(score: Scores, verdict: Verdict) -> Features | None:
    """Hidden states of the root and of every accepted node, in a step that was asked for them."""
    hidden, path = score.hidden, verdict.path
    if hidden is None:
        return None
    if path == tuple(range(1, len(path) + 1)):  # of a chain, and of a step without a draft
        return hidden[: len(path) + 1].clone()  # which does not keep the others of the batch
    return hidden.index_select(0, torch.tensor([0, *path], device=hidden.device))
