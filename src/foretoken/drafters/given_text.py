"""Continuations that a request itself gives, before the method's drafter is asked for guesses.

A grammar forces tokens: the law gives them all its mass, so they are certain, and cost no draft. A
prediction names tokens that are likely as long as text and prediction agree. Both are a chain below
the root. Behind forced tokens the drafter goes on as if they were written already, where it reads
nothing of the target's forward: its draft model is then not asked about any of them. In place of a
prediction it drafts where its own drafts have brought this text more than the prediction promises.

All choices look at what was written only. A given token is a draw from the law that always says it,
so any rule that is exact for fixed candidates is exact for the chain, and for what is drawn below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretoken.contract import Drafter, Features, StoppingRule
from foretoken.drafters.parts.prediction import Copied, Prediction
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.trees.build import chain, guessed_path
from foretoken.trees.worth import least_paying, paying
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Rows,
    Scores,
    Step,
    Taps,
    TokenTree,
    Verdict,
)
from foretoken.warp import point_mass

LONGEST = 64  # given tokens of a step: the largest forward that controllers know the cost of
LIKELY = 0.25  # chance of the last predicted token where nobody says what a node costs
NONE = Budget(0, 0)
FADE = 0.7  # of what a drafter's steps have brought a text


class GivenText(RowDrafter):
    """Given tokens first; what the inner drafter guesses behind them, or in their place."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.traits = replace(inner.traits, draws=inner.traits.draws | {Draw.POINT})

    @property
    def goes_on(self) -> bool:
        """Whether the drafter can guess behind tokens that the target has not read yet."""
        seen = self.inner.traits.taps or getattr(self.inner, "view", None) is not None
        return not (seen or reads_cache(self.inner))

    def start(self, row: DecodeState, seen: Features | None) -> None:
        self.inner.start(row, seen)

    def finish(self, row: DecodeState) -> None:
        super().finish(row)
        self.inner.finish(row)

    def reading(self) -> Taps:
        return self.inner.reading()

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]:
        turns = [self.turn(row, budget) for row, budget in zip(rows, budgets, strict=True)]
        own = self.inner.propose(
            [turn.row for turn in turns], [turn.budget for turn in turns], stop
        )
        for row, turn, draft in zip(rows, turns, own, strict=True):
            turn.own, row.prefill = draft, turn.row.prefill  # which a draft model's reading adds to
            row.private.setdefault(self, _Text()).turn = turn
        return [turn.joined(row) for row, turn in zip(rows, turns, strict=True)]

    def turn(self, row: DecodeState, budget: Budget) -> _Turn:
        """What is given of a row in this step, and how its drafter is asked."""
        if not foretold(row):
            return _Turn(row, budget)
        text: _Text = row.private.setdefault(self, _Text())
        grammar, wanted = row.params.grammar, row.room - 1
        if row.guesses is not None:
            wanted = min(wanted, row.guesses)
        most = min(wanted, LONGEST)
        forced = [] if grammar is None else grammar.forced(row.tokens, most)
        ahead = [*row.tokens, *forced] if forced else row.tokens
        last = len(forced) == most or (forced and grammar.over(ahead))  # nothing follows them
        left = 0 if last else wanted - len(forced)
        copied = self.copied(row, ahead, budget, min(left, most - len(forced)))
        count = len(copied.tokens)
        if budget.prices is not None:
            chances = [1.0] * len(forced) + copied.chances
            count = min(count, max(paying(chances, budget.prices)[0] - len(forced), 0))
        promised = sum(copied.chances[:count]) + (0 if self.goes_on else len(forced))
        if min(budget.depth, budget.nodes, left) <= 0 or (0.0 < promised >= text.usual):
            return _Turn(row, NONE, forced, copied, [*forced, *copied.tokens[:count]])
        if forced and self.goes_on:
            nodes = budget.nodes if row.guesses is None else min(budget.nodes, left)
            further = replace(budget, depth=min(budget.depth, left), nodes=nodes)
            return _Turn(replace(row, tokens=ahead), further, forced, copied, forced)
        return _Turn(row, budget, forced, copied)

    def copied(self, row: DecodeState, ahead: list[int], budget: Budget, count: int) -> Copied:
        """Predicted tokens behind those that are certain, as far as they may pay."""
        prediction: Prediction | None = row.prediction
        if prediction is None:
            return Copied([], [], [])
        prediction.follow(row.tokens)
        least = least_paying(budget) if budget.depth > 0 else None
        floor = LIKELY if least is None else least
        return prediction.copied(ahead, count, floor, row.warp.greedy, row.params.eos)

    def observe(self, step: Step) -> None:
        """Learn what predictions came to; the drafter sees what it has guessed itself."""
        turns: list[_Turn] = [row.private[self].turn for row in step.rows]
        for row, turn, draft, verdict, said in zip(
            step.rows, turns, step.drafts, step.verdicts, step.emitted, strict=True
        ):
            if not foretold(row):
                continue
            text: _Text = row.private[self]
            stood, forced = min(len(verdict.path), len(said)), len(turn.forced)
            if turn.budget.depth > 0:
                text.tried(stood - draft.given)
            if row.prediction is not None:
                row.prediction.tried(turn.copied, said[forced:], row.warp.greedy)
                tried = max(draft.given - forced, 0)
                good = min(max(stood - forced, 0), tried)
                row.prediction.accepted += good
                row.prediction.rejected += tried - good
        given = any(draft.given for draft in step.drafts)
        self.inner.observe(own_step(step, turns) if given else step)


def reads_cache(drafter: Any) -> bool:
    """Whether a draft model of it, or of its members, looks at the target's keys and values."""
    model = getattr(drafter, "model", None)
    members = getattr(drafter, "members", ())
    return getattr(model, "reads_cache", False) or any(map(reads_cache, members))


def foretold(row: DecodeState) -> bool:
    """Whether its request may say what comes next."""
    return row.prediction is not None or row.params.grammar is not None


def own_step(step: Step, turns: Sequence[_Turn]) -> Step:
    """The step as the drafter would have seen it, had the given tokens been written before it, or,
    where they stood in place of its own draft, had it drafted nothing.
    """
    drafts, scores, verdicts, emitted = [], [], [], []
    for turn, draft, score, verdict, said in zip(
        turns, step.drafts, step.scores, step.verdicts, step.emitted, strict=True
    ):
        assert turn.own is not None, "what is judged was proposed"
        path = verdict.path
        if draft.given and turn.budget.depth > 0:
            first = draft.given
            score = Scores(score.logits[first:], share=score.share)
            verdict = Verdict(guessed_path(draft, path), verdict.next_token)
            said = said[first:]
        elif draft.given:
            score = Scores(score.logits[:1], None, score.p, score.share)
            verdict = Verdict((), draft.tree.tokens[path[0]] if path else verdict.next_token)
        # One that nothing was given for is what was scored: others may have cut it.
        drafts.append(turn.own if draft.given else draft)
        scores.append(score)
        verdicts.append(verdict)
        emitted.append(said)
    return replace(
        step, drafts=tuple(drafts), scores=tuple(scores), verdicts=tuple(verdicts),
        emitted=tuple(emitted), whole=step.whole or step,
    )  # fmt: skip


def behind(given: Sequence[int], own: Draft, root: int) -> Draft:
    """A draft whose first nodes are given, and whose others were guessed behind the last of them.

    Each given token has a law of its own, which always says it; so the kind of draw of what was
    guessed holds for the whole.
    """
    size = len(given)
    tokens = (root, *given, *own.tree.tokens[1:])
    parents = (*range(-1, size), *(parent + size for parent in own.tree.parents[1:]))
    q = None
    if own.q is not None:
        like = next(law for law in own.q if law is not None)
        q = (*(point_mass(token, like) for token in given), *own.q)
    chances = None if own.chances is None else (*[1.0] * size, *own.chances)
    return Draft(TokenTree(tokens, parents), own.draw, q, chances, given=size)


@dataclass(slots=True)
class _Turn:
    """What is done for one row in the step under way."""

    row: DecodeState  # as its drafter sees it: behind forced tokens where it goes on there
    budget: Budget  # what its drafter may draft
    forced: list[int] = field(default_factory=list)
    copied: Copied = field(default_factory=lambda: Copied([], [], []))
    given: list[int] = field(default_factory=list)  # below the root
    own: Draft | None = None  # the drafter's

    def joined(self, row: DecodeState) -> Draft:
        """The row's draft: given tokens, and what was guessed behind them or in their place."""
        assert self.own is not None, "the drafter was asked"
        if not self.given:
            return self.own
        if len(self.own.tree) > 1:
            return behind(self.given, self.own, row.tokens[-1])
        chances = (1.0,) * (1 + len(self.forced))
        likely = self.copied.chances[: len(self.given) - len(self.forced)]
        return Draft(
            chain(row.tokens[-1], self.given), Draw.POINT, chances=(*chances, *likely),
            given=len(self.given),
        )  # fmt: skip


@dataclass(slots=True)
class _Text:
    """What is known of one row."""

    usual: float = 0.0  # tokens accepted of the drafter's own draft, lately
    steps: int = 0  # in which it was asked
    turn: _Turn | None = None  # of the step under way

    def tried(self, accepted: int) -> None:
        """The drafter was asked, and so much of its draft stood."""
        fade = FADE if self.steps else 0.0
        self.usual = fade * self.usual + (1.0 - fade) * max(accepted, 0)
        self.steps += 1
