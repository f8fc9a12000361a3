"""Rounds of rows that are a rectangle already: EXSPEC's schedule (arXiv 2510.22876).

A left-padded batch has to be realigned where its rows gained different numbers of tokens. Here more
rows are held than are decoded together, and a round takes rows of equal stored length from them,
which need no realigning. Where no such group is full, or the oldest row has sat out many rounds for
such groups, the oldest rows are realigned and taken. Once nobody waits there may be no full group
any more: then a group may be smaller, if it is at least half of what would be realigned.

Every row lies in a slot of the cache, so that a group is put together without copying anything; the
published code joins and splits the caches of its rows in every round. Prompts of rows that join
late are fed beside the rounds and counted as in any engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from foretoken.engine import admission
from foretoken.engine.engine import Engine
from foretoken.lm.runtime.alignment import Alignment
from foretoken.types import DecodeState, Rows, Step

POOL = 3  # rows held for each one that is decoded at a time, unless the window is named
PATIENCE = 16  # rounds that the oldest row may sit out while there are full groups of others


class ShortestFirst(admission.Waiting):
    """Of the most urgent rows the one with the shortest prompt is next; one that many others were
    let in before comes before it, however long its prompt is."""

    def next(self, inside: Rows) -> DecodeState | None:
        row = super().next(inside)
        if row is None or self.overdue(row):
            return row
        return min(self.like(row), key=lambda one: len(one.tokens), default=row)


@dataclass(eq=False)
class GroupingEngine(Engine):
    """An engine that decodes up to `max_rows` of the rows in its window together."""

    taken: Rows = ()  # of the last round
    before: Rows = ()  # that ran when it was over
    sat_out: Counter[int] = field(default_factory=Counter)  # rounds in a row, by uid

    def __post_init__(self) -> None:
        super().__post_init__()
        self.listeners.append(self.note_aside)
        if self.drafter.model.config.sort_prompts:  # type: ignore[attr-defined]
            self.waiting = ShortestFirst()

    @property
    def alignment(self) -> Alignment:
        """Stored lengths of the target's rows."""
        found: Alignment = self.drafter.model.view.alignment  # type: ignore[attr-defined]
        return found

    @property
    def most_held(self) -> int:
        """The window; never fewer rows than are decoded together."""
        window: int | None = self.drafter.model.config.window  # type: ignore[attr-defined]
        return max(POOL * self.max_rows if window is None else window, self.max_rows)

    def chosen(self) -> Rows:
        """A full group of equal stored length, the oldest first; else rows to be realigned."""
        for row in self.taken:
            row.aside = 0.0  # whoever counts was told by now
        oldest = tuple(self.running[: self.max_rows])
        if self.sat_out[oldest[0].uid] >= PATIENCE:
            return oldest
        groups: dict[int, list[DecodeState]] = defaultdict(list)
        for row in self.running:
            groups[self.alignment.stored(row)].append(row)
        for group in groups.values():
            if len(group) >= self.max_rows:
                return tuple(group[: self.max_rows])
        largest = max(groups.values(), key=len)
        if not self.waiting and not self.filling and 2 * len(largest) >= len(oldest):
            return tuple(largest)
        return oldest

    def note_aside(self, step: Step) -> None:
        """Rows that sat a round out have waited for it, and for prompts that were fed before it.

        Of a row's first round, whoever counts takes its own prompt alone, and so of the step in
        which it began to run.
        """
        prompts = step.times.prefill
        for row in self.running:
            if row not in step.rows:
                row.aside += step.times.whole + (prompts if row in self.before else 0.0)
        for row, emitted in zip(step.rows, step.emitted, strict=True):
            if row in self.before and len(row.tokens) - row.prompt_len == len(emitted):
                row.aside += prompts
        self.taken, self.before = step.rows, tuple(self.running)
        idle = [row.uid for row in self.running if row not in step.rows]
        self.sat_out = Counter({uid: 1 + self.sat_out[uid] for uid in idle})
