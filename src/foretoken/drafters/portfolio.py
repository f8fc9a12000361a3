"""A portfolio of drafters, of which one drafts: look-ups in one tree, or whoever pays just now.

A look-up costs next to nothing, so it is made in any case; a bandit over the paces of the others
says what one of them promises, and it drafts where the look-up is worth less. Every member sees
every outcome, and its hidden states in those steps only in which it asks for some. Nothing is
merged: a chain behind an early exit costs layers, whose price a tree of look-ups must not pay.
Every draft is judged by its own kind, and look-ups are fixed candidates, so choosing by their worth
is exact. Members that find out that they can never pay on this target are not asked any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from foretoken.contract import (
    Drafter,
    Features,
    LanguageModel,
    NoOptions,
    Retires,
    StoppingRule,
    Views,
)
from foretoken.drafters.fusion import Fusion, merges
from foretoken.drafters.parts.bandit import Bandit, paces
from foretoken.drafters.parts.members import Combination
from foretoken.errors import PairingError
from foretoken.trees.counts import Pace
from foretoken.trees.worth import worth
from foretoken.types import Budget, DecodeState, Draft, Draw, Memory, Rows, Shape, Step, Traits


class Portfolio(Combination):
    """The first member merges all that can be merged; every other one stands alone."""

    traits = Traits(
        draws=frozenset({Draw.POINT, Draw.IID}),
        shape=Shape.TREE,
        memory=Memory.ENGINE,
        prices=True,
    )
    view: LanguageModel  # of the member that has one

    def __init__(self, *members: Drafter, config: NoOptions | None = None) -> None:
        alone = [member for member in members if not merges(member)]
        super().__init__(Fusion(*(member for member in members if merges(member))), *alone)
        self.bandit = Bandit(len(alone))
        views = [member.view for member in alone if isinstance(member, Views)]
        if len(views) > 1:
            raise PairingError(
                f"a portfolio of {', '.join(type(member).__name__ for member in alone)}.",
                "the target is scored through one view, and several members bring their own.",
                "name one of them.",
            )
        for view in views:
            self.view = view

    def start(self, row: DecodeState, seen: Features | None) -> None:
        row.private[self] = _Text(paces(len(self.members) - 1))
        super().start(row, seen)

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]:
        first, *others = self.members
        drafts = first.propose(rows, budgets, stop)
        for row in rows:
            row.private[self].turn = None
        # Seconds never come again, so they choose nothing where a seed has to repeat its text.
        free = [
            at
            for at, (row, budget) in enumerate(zip(rows, budgets, strict=True))
            if budget.prices is not None and not (row.repeatable or row.rehearsal)
        ]
        if free and self.alive():
            open_, granted = [rows[at] for at in free], [budgets[at] for at in free]
            arm = self.choose(open_, [drafts[at] for at in free], granted)
            if arm is not None:
                made = others[arm].propose(open_, granted, stop)
                if all(len(draft.tree) == 1 for draft in made):
                    self.declined(arm, open_)
                else:
                    for at, draft in zip(free, made, strict=True):
                        drafts[at] = draft
        return drafts

    def alive(self) -> bool:
        """Whether any member beside the first may ever pay; taps that nobody reads are dropped."""
        arms = self.bandit.arms
        for arm in sorted(arms):
            member = self.members[1 + arm]
            if isinstance(member, Retires) and member.hopeless:
                arms.remove(arm)
                if not any(self.members[1 + other].traits.taps for other in arms):
                    self.traits = replace(self.traits, taps=(), context=None)
        return bool(arms)

    def declined(self, arm: int, rows: Rows) -> None:
        """An arm that was chosen makes no draft, so what was looked up stands."""
        self.bandit.declined(arm)
        for row in rows:
            row.private[self].turn = replace(row.private[self].turn, arm=None)

    def choose(self, rows: Rows, found: Sequence[Draft], budgets: Sequence[Budget]) -> int | None:
        """The arm that drafts for these rows; None: what was looked up is worth more."""
        prices = budgets[0].prices
        assert prices is not None, "who may be chosen is told what a step costs"
        texts: list[_Text] = [row.private[self] for row in rows]
        arm, promised = self.bandit.choose([text.paces for text in texts], prices.step)
        worths = [
            worth(draft.chances or (1.0,), budget.prices)
            for draft, budget in zip(found, budgets, strict=True)
        ]
        if sum(worths) >= promised * len(rows):
            arm = None
        turn = _Turn(arm, promised == inf, prices.second / prices.step, prices.step)
        for text in texts:
            text.turn = turn
        return arm

    def observe(self, step: Step) -> None:
        super().observe(step)
        texts, emitted = [], []
        for row, verdict in zip(step.rows, step.verdicts, strict=True):
            if row.private[self].turn is not None:
                texts.append(row.private[self])
                emitted.append(len(verdict.path) + 1)
        if texts:
            turn: _Turn = texts[0].turn
            spent = step.times.whole * turn.pace
            self.bandit.update(
                turn.arm, [text.paces for text in texts], emitted, spent, turn.forced, turn.speed
            )


@dataclass(frozen=True, slots=True)
class _Turn:
    """Who drafts in a step, for the rows that were free to choose."""

    arm: int | None  # None: the first member
    forced: bool  # a trial
    pace: float  # plain steps per second
    speed: float = 1.0  # tokens in the time of a plain step that were within reach


@dataclass(slots=True)
class _Text:
    """What is kept of one row."""

    paces: list[Pace]  # of each arm in this text
    turn: _Turn | None = None  # of the step under way, where there was a choice
