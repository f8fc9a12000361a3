"""One round of decoding as named phases: plan, propose, score, judge, commit, learn.

The step that drafts while it verifies and the measurement of costs are made of the same phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from foretoken.contract import Controller, Drafter, LanguageModel, Verifier
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Rows,
    Scores,
    Step,
    StepTimes,
    Verdict,
)


@dataclass(eq=False)
class Parts:
    """Target, drafter, rule and controller of one engine."""

    target: LanguageModel
    drafter: Drafter
    verifier: Verifier
    controller: Controller


def advance(rows: Rows, parts: Parts) -> Step:
    """One round. Every row grows by at least one token."""
    began = perf_counter()
    budgets = plan(rows, rows, parts)
    planned = perf_counter()
    proposed = propose_timed(rows, budgets, parts)
    drafted = perf_counter()
    drafts = parts.controller.admit(rows, proposed.drafts)
    admitted = perf_counter()
    scores = score(rows, drafts, parts)  # the only target forward
    scored = perf_counter()
    verdicts = judge(rows, drafts, scores, parts)
    emitted = commit(rows, drafts, verdicts, parts)
    ended = perf_counter()
    other = (planned - began) + (admitted - drafted) + (ended - scored)
    seconds = proposed.seconds, scored - admitted, other
    step = step_of(rows, drafts, scores, verdicts, emitted, *seconds)
    step.times.prefill = proposed.reading
    learn(step, parts)
    return step


def step_of(
    rows: Rows,
    drafts: Sequence[Draft],
    scores: Sequence[Scores],
    verdicts: Sequence[Verdict],
    emitted: Sequence[list[int]],
    draft: float,
    target: float,
    other: float,
    hidden: float = 0.0,
) -> Step:
    """A round that is over, for who looks at it; what it took, in seconds, as in StepTimes."""
    nodes = sum([len(draft.tree.tokens) for draft in drafts])
    context = max([len(row.tokens) for row in rows])
    times = StepTimes(len(rows), nodes, context, draft, target, other, hidden)
    return Step(tuple(rows), tuple(drafts), tuple(scores), tuple(verdicts), tuple(emitted), times)


def plan(rows: Rows, drafted_for: Rows, parts: Parts) -> list[Budget]:
    """What the controller grants `rows`, clipped to what the rows drafted for have room for."""
    longest = parts.target.max_length
    granted = parts.controller.budgets(rows)
    return [clip(row, b, longest) for row, b in zip(drafted_for, granted, strict=True)]


def clip(row: DecodeState, budget: Budget, longest: int | None) -> Budget:
    """A budget within what the row wants, its cap, and the model's positions."""
    depth, nodes = min(budget.depth, row.room - 1), budget.nodes  # a verdict adds one token more
    if longest is not None:
        depth = min(depth, longest - len(row.tokens))
    if row.guesses is not None:
        depth, nodes = min(depth, row.guesses), min(nodes, row.guesses)
    if depth == budget.depth and nodes == budget.nodes:
        return budget
    return replace(budget, depth=depth, nodes=nodes) if depth > 0 else Budget(0, 0)


def propose(rows: Rows, budgets: Sequence[Budget], parts: Parts) -> list[Draft]:
    return parts.drafter.propose(rows, budgets, parts.controller.stop)


@dataclass(frozen=True, slots=True)
class Proposed:
    """Drafts, and what they took."""

    drafts: Sequence[Draft]
    seconds: float
    reading: float  # seconds in which a draft model read texts it had not seen: no drafting


def propose_timed(rows: Rows, budgets: Sequence[Budget], parts: Parts) -> Proposed:
    """As `propose`, by the clock."""
    before, began = [row.prefill for row in rows], perf_counter()
    drafts = propose(rows, budgets, parts)
    took = perf_counter() - began
    reading = max([row.prefill - old for row, old in zip(rows, before, strict=True)])
    return Proposed(drafts, max(took - reading, 0.0), reading)


def score(rows: Rows, drafts: Sequence[Draft], parts: Parts) -> list[Scores]:
    return parts.target.score(rows, drafts, parts.drafter.reading())


def judge(
    rows: Rows, drafts: Sequence[Draft], scores: Sequence[Scores], parts: Parts
) -> list[Verdict]:
    """Verdicts under the same warp that made q."""
    for row, draft, said in zip(rows, drafts, scores, strict=True):
        said.p = row.warp.laws(row.tokens, draft.tree, said.logits)
    return parts.verifier.verify(rows, drafts, scores)


def commit(
    rows: Rows, drafts: Sequence[Draft], verdicts: Sequence[Verdict], parts: Parts
) -> list[list[int]]:
    """Accepted nodes enter the target's cache and the text; the tokens that each row gained."""
    parts.target.commit(rows, [verdict.path for verdict in verdicts])
    emitted = []
    for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
        accepted = [draft.tree.tokens[node] for node in verdict.path]
        emitted.append(extended(row, [*accepted, verdict.next_token]))
    return emitted


def extended(row: DecodeState, tokens: Sequence[int]) -> list[int]:
    """The tokens a row takes over; a stopping criterion that raises ends its own row only."""
    before = len(row.tokens)
    try:
        return row.extend(tokens)
    except BaseException as error:  # a caller's code: told to that caller, unchanged
        row.fail(error)
        return row.tokens[before:]


def learn(step: Step, parts: Parts) -> None:
    """Drafter and controller see what came of it; what the drafter takes counts as drafting."""
    began = perf_counter()
    parts.drafter.observe(step)
    step.times.draft += perf_counter() - began
    parts.controller.observe(step)


def joined(steps: Sequence[Step]) -> Step:
    """Steps of single rows as one."""
    first = steps[0]
    for step in steps[1:]:
        for name in ("rows", "nodes", "draft", "target", "other", "hidden", "prefill"):
            setattr(first.times, name, getattr(first.times, name) + getattr(step.times, name))
    return Step(
        tuple(row for step in steps for row in step.rows),
        tuple(draft for step in steps for draft in step.drafts),
        tuple(score for step in steps for score in step.scores),
        tuple(verdict for step in steps for verdict in step.verdicts),
        tuple(tokens for step in steps for tokens in step.emitted),
        first.times,
    )
