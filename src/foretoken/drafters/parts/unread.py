"""Texts that a draft model reads when it is drafted for with them for the first time.

In a batch too large for drafts to pay nobody pays for prompts twice.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from foretoken.types import DecodeState, Rows

LONG = 64  # tokens that wait of a text that was read before, from which on they are priced
SLOWER, FASTER = 0.2, 0.5  # weight of the texts read last in what reading is known to take: what
# disturbs a reading makes it longer
SURPRISE = 2.0  # a pause of the machine counts as this factor at most


class Unread:
    """The rows whose texts wait, by uid, and what reading them takes.

    `missing(row)`: tokens that the model has yet to read.
    """

    def __init__(self, missing: Callable[[DecodeState], int]) -> None:
        self.uids: set[int] = set()
        self.missing = missing
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
        """Seconds until this row can be drafted for: the few tokens of its last steps aside."""
        count = self.missing(row)
        return self.pace * count if row in self or count >= LONG else 0.0

    def read(self, rows: Rows, feed: Callable[[list[DecodeState]], None]) -> None:
        """Have those of the rows that wait fed, and count it as their prompts'; if it fails, they
        wait as before.
        """
        new = [row for row in rows if row in self]
        if not new:
            return
        count = sum(map(self.missing, new)) + reused(new)  # of other models, before
        began = perf_counter()
        feed(new)
        self.uids.difference_update([row.uid for row in new])
        took = perf_counter() - began
        for row in new:
            row.prefill += took
        if (fed := count - reused(new)) > 0:
            self.learn(took / fed)

    def learn(self, pace: float) -> None:
        """Take in what a token took."""
        if not self.pace:
            self.pace = pace
        elif pace < self.pace:
            self.pace += FASTER * (pace - self.pace)
        else:
            self.pace += SLOWER * (min(pace, SURPRISE * self.pace) - self.pace)


def reused(rows: Rows) -> int:
    """Tokens that any model took over from earlier texts instead of reading them."""
    return sum([sum(row.reused.values()) for row in rows])
