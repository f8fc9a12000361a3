"""Prompts that begin alike and are there at once: one is fed, the others copy what it made.

Several texts of one request, or clients that arrive together with one long system prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.types import DecodeState

LEAST = 32  # tokens of a prompt that is worth waiting for half of


class Alike:
    """Prompts that wait until one that begins as they do is cached."""

    def __init__(self) -> None:
        self.behind: dict[int, DecodeState] = {}  # by uid: which prompt a row waits for

    def add(self, row: DecodeState, fed: Sequence[DecodeState]) -> None:
        """Have a row wait for the first of the prompts under way that begins as it does."""
        for other in fed:
            if mostly_shared(row, other):
                self.behind[row.uid] = other
                return

    def parted(self, rows: Sequence[DecodeState]) -> tuple[list[DecodeState], list[DecodeState]]:
        """Of the prompts under way those that are fed, and those that wait for one of them."""
        if not self.behind:
            return list(rows), []
        under_way = {row.uid for row in rows}
        waits = [row.uid in self.behind and self.behind[row.uid].uid in under_way for row in rows]
        pairs = list(zip(rows, waits, strict=True))
        return [row for row, held in pairs if not held], [row for row, held in pairs if held]

    def awaited(self, row: DecodeState) -> bool:
        """Whether a prompt waits for this one, which is cached now; from then on none does."""
        waiting = [uid for uid, other in self.behind.items() if other is row]
        for uid in waiting:
            del self.behind[uid]
        return bool(waiting)

    def forget(self, row: DecodeState) -> None:
        """A row has left, and waits for nobody."""
        self.behind.pop(row.uid, None)


def mostly_shared(row: DecodeState, other: DecodeState) -> bool:
    """Whether another prompt of its owner begins with half of a row's own, and is not more than
    twice as long: all of it is read before the row is.
    """
    if row.owner != other.owner or row.prompt_len < LEAST or other.prompt_len > 2 * row.prompt_len:
        return False
    return row.tokens[: half_of(row)] == other.tokens[: half_of(row)]


def half_of(row: DecodeState) -> int:
    """Tokens of a prompt that are to be shared if it waits."""
    return (row.prompt_len + 1) // 2
