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
from foretoken.drafters.parts.members import Combination, own_part
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
            row.private[self].turn = row.private[self].passed = None
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
                self.passed(arm, open_, made)
                for at, draft in zip(free, made, strict=True):
                    if len(draft.tree) > 1:
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

    def passed(self, arm: int, rows: Rows, made: Sequence[Draft]) -> None:
        """Of rows that the arm makes no draft for, what was looked up stands, and says nothing of
        the arm; one that makes no draft at all is not asked again soon.
        """
        left = [(row, draft) for row, draft in zip(rows, made, strict=True) if len(draft.tree) == 1]
        for row, draft in left:
            text: _Text = row.private[self]
            assert text.turn is not None, "the arm was chosen for it"
            text.turn, text.passed = replace(text.turn, arm=None), (arm, draft)
        if len(left) == len(rows):
            self.bandit.declined(arm)

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

    def shown(self, step: Step, at: int) -> Step:
        """An arm sees its own empty draft where a look-up was scored in its place: a tree of the
        look-up's is none that its model has open.
        """
        own, differs = list(step.drafts), False
        for place, row in enumerate(step.rows):
            passed = row.private[self].passed
            if passed is not None and passed[0] + 1 == at:
                own[place], differs = passed[1], True
        return own_part(step, own) if differs else step

    def observe(self, step: Step) -> None:
        super().observe(step)
        chosen = [
            (text.turn, text.paces, len(verdict.path) + 1)
            for row, verdict in zip(step.rows, step.verdicts, strict=True)
            if (text := row.private[self]).turn is not None
        ]
        if chosen:
            turn = next((one for one, _, _ in chosen if one.arm is not None), chosen[0][0])
            own = [(paces, brought) for one, paces, brought in chosen if one.arm == turn.arm]
            texts, emitted = zip(*own, strict=True)
            spent = step.times.whole * turn.pace
            self.bandit.update(turn.arm, texts, emitted, spent, turn.forced, turn.speed)


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
    # the arm that was asked in it in vain, and its draft: the root alone
    passed: tuple[int, Draft] | None = None
