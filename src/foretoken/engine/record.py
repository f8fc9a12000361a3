"""What a row did, step by step, and what it cost: the numbers behind `out.stats`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from foretoken.types import DecodeState, Step


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of one row."""

    drafted: int  # candidate tokens proposed (nodes below the root)
    depth: int  # longest candidate path
    accepted: int  # candidates that became text
    emitted: tuple[int, ...]  # accepted tokens, then the correction or bonus
    corrected: bool = False  # whether the last one stands where another was guessed


@dataclass(slots=True, repr=False)
class Stats:
    """One row's counters. Seconds are wall time the row was running, its prompt included.

    `target_seconds` holds the prompt's forward (`prefill_seconds`) too. Rows of a batch share
    their forwards: each counts the whole of a shared step, for that is how long it waited.
    """

    tokens: int = 0
    target_steps: int = 0  # target forwards after the prompt
    drafted: int = 0
    accepted: int = 0
    accepted_prediction: int = 0  # tokens of the caller's prediction that were guessed and stood
    rejected_prediction: int = 0  # and that were guessed in vain
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    hidden_seconds: float = 0.0  # drafting that would have passed behind the target (emulation)
    emitted_per_step: Counter[int] = field(default_factory=Counter)  # tokens -> steps
    drafted_at_depth: Counter[int] = field(default_factory=Counter)  # depth -> steps that got there
    accepted_at_depth: Counter[int] = field(default_factory=Counter)

    @property
    def other_seconds(self) -> float:
        """Laws, verdicts, commits, bookkeeping, and rounds that others took alone."""
        return max(self.seconds - self.draft_seconds - self.target_seconds, 0.0)

    @property
    def modelled_seconds(self) -> float:
        """Seconds with a device for each model; the measured ones where nothing was emulated."""
        return self.seconds - self.hidden_seconds

    @property
    def mean_accepted_length(self) -> float:
        """Emitted tokens per target forward; 1.0 is plain decoding."""
        return self.tokens / self.target_steps if self.target_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of all drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Where the seconds went; sums to one."""
        total = self.draft_seconds + self.target_seconds + self.other_seconds
        if total <= 0:
            return {"draft": 0.0, "target": 0.0, "other": 0.0}
        return {
            "draft": self.draft_seconds / total,
            "target": self.target_seconds / total,
            "other": self.other_seconds / total,
        }

    @property
    def acceptance_per_depth(self) -> list[float]:
        """Entry d-1: of the drafts that reached depth d, the share accepted at least so far."""
        deepest = max(self.drafted_at_depth, default=0)
        return [self.accepted_at_depth[d] / self.drafted_at_depth[d] for d in range(1, deepest + 1)]

    def __str__(self) -> str:
        """One line for a reader."""
        line = (
            f"{self.tokens} tokens in {self.seconds:.2f} s, {self.tokens_per_second:.1f} tokens/s; "
            f"{self.target_steps} target steps, {self.mean_accepted_length:.2f} tokens per step"
        )
        if self.drafted:
            line += f"; {self.accepted} of {self.drafted} guesses accepted"
        return line

    def __repr__(self) -> str:
        return f"<Stats: {self}>"

    def add(self, trace: StepTrace) -> None:
        """Count one step."""
        self.target_steps += 1
        self.tokens += len(trace.emitted)
        self.drafted += trace.drafted
        self.accepted += trace.accepted
        self.emitted_per_step[len(trace.emitted)] += 1
        self.drafted_at_depth.update(range(1, trace.depth + 1))
        self.accepted_at_depth.update(range(1, trace.accepted + 1))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return {
            "tokens": self.tokens,
            "target_steps": self.target_steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_prediction": self.accepted_prediction,
            "rejected_prediction": self.rejected_prediction,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "draft_seconds": self.draft_seconds,
            "target_seconds": self.target_seconds,
            "other_seconds": self.other_seconds,
            "modelled_seconds": self.modelled_seconds,
            "shares": self.shares,
            "emitted_per_step": {str(n): c for n, c in sorted(self.emitted_per_step.items())},
            "acceptance_per_depth": self.acceptance_per_depth,
        }


def trace_of(step: Step, at: int) -> StepTrace:
    """What a step did to the row at a place."""
    tree, emitted, path = step.drafts[at].tree, step.emitted[at], step.verdicts[at].path
    guessed: set[int] = set()  # in place of the target's own token, where there is one
    if len(emitted) > len(path):
        last = path[-1] if path else 0
        guessed = {t for t, of in zip(tree.tokens, tree.parents, strict=True) if of == last}
    return StepTrace(
        drafted=len(tree) - 1,
        depth=len(tree) - 1 if tree.is_chain else max(tree.depths()),
        accepted=min(len(path), len(emitted)),  # a stop can cut the path short
        emitted=tuple(emitted),
        corrected=bool(guessed) and emitted[-1] not in guessed,
    )


class Recorder:
    """Collects statistics and traces per row, told of every step."""

    def __init__(self, rows: Iterable[DecodeState]) -> None:
        self.stats = {row.uid: Stats() for row in rows}
        self.steps: dict[int, list[StepTrace]] = {uid: [] for uid in self.stats}

    def __call__(self, step: Step) -> None:
        """Take in a step of these rows."""
        for at in range(len(step.rows)):
            self.row(step, at)

    def row(self, step: Step, at: int) -> None:
        """Take in what a step did to one of them."""
        row, times = step.rows[at], step.times
        stats, steps = self.stats[row.uid], self.steps[row.uid]
        waited = row.prefill if not steps else times.prefill  # for its own prompt, or for others'
        if not steps:
            stats.prefill_seconds = row.prefill
        stats.seconds += times.whole + waited + row.aside
        stats.draft_seconds += times.draft
        stats.target_seconds += times.target + waited
        stats.hidden_seconds += times.hidden
        trace = trace_of(step, at)
        stats.add(trace)
        if row.prediction is not None:
            stats.accepted_prediction = row.prediction.accepted
            stats.rejected_prediction = row.prediction.rejected
        steps.append(trace)
