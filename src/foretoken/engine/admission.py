"""Who waits for a place in the batch, and who gets the next one.

The most urgent priority first; among equals the owner who has the fewest rows in the batch, so that
many requests of one do not hold up a single one of another; among an owner's the requester who has
the fewest, then whoever came first. A row that many others were let in before counts as urgent as
the most urgent one that waits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from threading import Lock

from foretoken.errors import ForetokenError
from foretoken.types import DecodeState, Rows

PATIENCE = 64  # rows that may be let in before one that waits


class Waiting:
    """Rows that were submitted and have no place yet; any thread may add and remove."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._since: dict[DecodeState, int] = {}  # by arrival: how many had been let in by then
        self._let_in = 0

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[DecodeState]:
        """Rows in order of arrival, as they are now."""
        with self._lock:
            return iter(tuple(self._since))

    def add(self, row: DecodeState) -> None:
        """Have a row wait."""
        with self._lock:
            self._since[row] = self._let_in

    def remove(self, rows: Iterable[DecodeState]) -> None:
        """Forget rows; others are ignored."""
        with self._lock:
            for row in rows:
                self._since.pop(row, None)

    def next(self, inside: Rows) -> DecodeState | None:
        """The row whose turn it is, beside those that have a place; None where nobody waits."""
        with self._lock:
            if not self._since:
                return None
            owners = Counter(row.owner for row in inside)
            held = Counter((row.owner, row.requester) for row in inside)
            urgent = min(row.priority for row in self._since)
            arrivals = itertools.count()
            return min(
                self._since,
                key=lambda row: (
                    urgent if self._overdue(row) else row.priority,
                    owners[row.owner],
                    held[row.owner, row.requester],
                    next(arrivals),
                ),
            )

    def _overdue(self, row: DecodeState) -> bool:
        return self._let_in - self._since[row] >= PATIENCE

    def refusal(self, row: DecodeState) -> ForetokenError | None:
        """Why a row could only wait for ever; None where it cannot be known."""
        return None

    @property
    def longest(self) -> int | None:
        """Most tokens of a text, prompt included; None: as many as the model takes."""
        return None

    def affords(self, tokens: int, nodes: int, rows: int = 1) -> bool:
        """Whether rows for measuring may have trees of so many nodes behind so many tokens."""
        return True

    def take(self, row: DecodeState) -> None:
        """Give a row that waits its place."""
        with self._lock:
            self._since.pop(row, None)
            self._let_in += 1
