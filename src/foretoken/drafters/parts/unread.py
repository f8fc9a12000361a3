"""Texts that a draft model reads when it is drafted for with them for the first time.

In a batch too large for drafts to pay nobody pays for prompts twice.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from foretoken.types import DecodeState, Rows

RECENT = 0.2  # weight of the texts read last in what reading is known to take


class Unread:
    """The rows whose texts wait, by uid, and what reading them takes."""

    def __init__(self) -> None:
        self.uids: set[int] = set()
        self.pace = 0.0  # seconds that reading a token took so far

    def __len__(self) -> int:
        return len(self.uids)

    def __contains__(self, row: DecodeState) -> bool:
        return row.uid in self.uids

    def add(self, row: DecodeState) -> None:
        self.uids.add(row.uid)

    def discard(self, row: DecodeState) -> None:
        self.uids.discard(row.uid)

    def to_read(self, row: DecodeState) -> float:
        """Seconds until this row can be drafted for."""
        return self.pace * len(row.tokens) if row in self else 0.0

    def read(self, rows: Rows, feed: Callable[[list[DecodeState]], None]) -> None:
        """Have those of the rows that wait fed, and count it as their prompts'; if it fails, they
        wait as before.
        """
        new = [row for row in rows if row in self]
        if not new:
            return
        began = perf_counter()
        feed(new)
        self.uids.difference_update([row.uid for row in new])
        took = perf_counter() - began
        pace = took / sum([len(row.tokens) for row in new])
        self.pace += (pace - self.pace) * (RECENT if self.pace else 1.0)
        for row in new:
            row.prefill += took
