"""Who waits for a place in the batch, and who gets the next one.

The owner who has the fewest rows in the batch comes first, so that many or urgent requests of one
do not hold up a single one of another; of an owner's rows the most urgent priority; among equals
the requester who has the fewest, then whoever came first. A row that many others were let in before
counts as urgent as the most urgent one of its owner that waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from threading import RLock
from typing import NamedTuple

from foretoken.errors import ForetokenError
from foretoken.types import DecodeState, Rows

PATIENCE = 64  # rows that may be let in before one that waits
LOOKED = 256  # rows that wait of which a step looks whether they are over
Kind = tuple[int, str, str]  # priority, owner and requester, which never change


class Since(NamedTuple):
    """When a row came."""

    arrival: int  # how many had come
    let_in: int  # how many had been let in


def kind(row: DecodeState) -> Kind:
    """Rows of a kind are let in as they came."""
    return row.priority, row.owner, row.requester


class Waiting:
    """Rows that were submitted and have no place yet; any thread may add and remove."""

    def __init__(self) -> None:
        # Re-entered where the garbage collector drops a stream in the midst of this: rows that
        # ended are forgotten then, and what is half done here has to stay right.
        self._lock = RLock()
        self._since: dict[DecodeState, Since] = {}  # in order of arrival
        self._alike: dict[Kind, dict[DecodeState, None]] = {}  # the same rows, kind by kind
        self._arrived = self._let_in = self._looks = 0
        # Whoever ends a row that may wait says so; without a lock, as the garbage collector may.
        self.ends = False

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[DecodeState]:
        """Rows in order of arrival, as they are now."""
        with self._lock:
            return iter(tuple(self._since.copy()))

    def add(self, row: DecodeState) -> None:
        """Have a row wait."""
        what = kind(row)
        with self._lock:
            self._arrived += 1
            alike = self._alike.setdefault(what, {})
            alike[row] = None
            self._alike[what] = alike  # the last of its kind may have been forgotten meanwhile
            self._since[row] = Since(self._arrived, self._let_in)  # it waits from here on

    def remove(self, rows: Iterable[DecodeState]) -> None:
        """Forget rows; others are ignored."""
        with self._lock:
            for row in rows:
                self._forget(row)

    def _forget(self, row: DecodeState) -> None:
        if self._since.pop(row, None) is not None:
            alike = self._alike[kind(row)]
            del alike[row]
            if not alike:
                del self._alike[kind(row)]

    def ended(self) -> list[DecodeState]:
        """Rows that ended while they waited. Very many are looked at where some were said to have
        ended, else not in every step, but `LOOKED` in the mean.
        """
        self._looks += 1
        if not self.ends and self._looks * LOOKED < len(self._since):
            return []
        self._looks, self.ends = 0, False
        return [row for row in self if row.finish is not None]

    def next(self, inside: Rows) -> DecodeState | None:
        """The row whose turn it is, beside those that have a place; None where nobody waits.

        Of rows of a kind it is the one that came first: as many kinds are compared as wait.
        """
        with self._lock:
            if not self._since:
                return None
            owners = Counter(row.owner for row in inside)
            held = Counter((row.owner, row.requester) for row in inside)
            urgent: dict[str, int] = {}
            for priority, owner, _ in self._alike:
                urgent[owner] = min(priority, urgent.get(owner, priority))
            return min(
                (next(iter(alike)) for alike in self._alike.values()),
                key=lambda row: (
                    owners[row.owner],
                    urgent[row.owner] if self._overdue(row) else row.priority,
                    held[row.owner, row.requester],
                    self._since[row].arrival,
                ),
            )

    def like(self, row: DecodeState) -> list[DecodeState]:
        """Rows of its kind that wait, in order of arrival."""
        with self._lock:
            return list(self._alike.get(kind(row), ()))

    def overdue(self, row: DecodeState) -> bool:
        """Whether many others were let in before a row that waits."""
        with self._lock:
            return row in self._since and self._overdue(row)

    def _overdue(self, row: DecodeState) -> bool:
        return self._let_in - self._since[row].let_in >= PATIENCE

    def refusal(self, row: DecodeState) -> ForetokenError | None:
        """Why a row could only wait for ever; None where it cannot be known."""
        return None

    @property
    def longest(self) -> int | None:
        """Most tokens of a text, prompt included; None: as many as the model takes."""
        return None

    @property
    def usual(self) -> int | None:
        """Tokens of a text, prompt included, of which several have a place at once; None: of any
        text that the model takes."""
        return None

    def affords(self, tokens: int, nodes: int, rows: int = 1) -> bool:
        """Whether rows for measuring may have trees of so many nodes behind so many tokens."""
        return True

    def affords_check(self, tokens: int, rows: int = 1) -> bool:
        """Whether a text of so many tokens, one of so many, may be read without its cache."""
        return True

    def take(self, row: DecodeState) -> None:
        """Give a row that waits its place."""
        with self._lock:
            self._forget(row)
            self._let_in += 1
