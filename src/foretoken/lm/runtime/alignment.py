"""Where the rows of a left-padded batch begin, and how often they had to be moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.types import DecodeState, Rows


@dataclass(frozen=True, slots=True)
class Move:
    """One row's new left padding."""

    row: DecodeState
    source: int  # pads before
    target: int


@dataclass(slots=True, eq=False)
class Alignment:
    """Left padding by row. A round is a forward over rows that share a batch, its draft's or its
    target's; a row alone needs no company to be aligned with and is not counted.
    """

    pads: dict[int, int] = field(default_factory=dict)  # uid -> pads; absent: none
    rounds: int = 0  # of several rows
    realigned: int = 0  # rounds whose rows had to be moved first
    moved: int = 0  # rows that were moved, each time
    seconds: float = 0.0  # that moving took

    def pad(self, row: DecodeState) -> int:
        """Pads before the row's first token."""
        return self.pads.get(row.uid, 0)

    def stored(self, row: DecodeState) -> int:
        """Length of a row with its pads: rows that are equal in it are a rectangle as they are."""
        return self.pad(row) + len(row.tokens)

    def align(self, rows: Rows) -> list[Move]:
        """Count a round of these rows, and say which have to be moved for it.

        Where they do not end together, all are padded anew, to the longest of them.
        """
        if len(rows) == 1:
            return []
        self.rounds += 1
        if len({self.stored(row) for row in rows}) == 1:
            return []
        longest = max(len(row.tokens) for row in rows)
        moves = []
        for row in rows:
            before, now = self.pad(row), longest - len(row.tokens)
            if before != now:
                moves.append(Move(row, before, now))
                self.pads[row.uid] = now
        self.realigned += 1
        self.moved += len(moves)
        return moves

    def undo(self, moves: Sequence[Move]) -> None:
        """Rows that could not be moved lie behind the pads they had."""
        for move in moves:
            self.pads[move.row.uid] = move.source

    def forget(self, rows: Rows) -> None:
        """Rows that left."""
        for row in rows:
            self.pads.pop(row.uid, None)


def told(alignments: Sequence[Alignment]) -> str:
    """One line about a target's batches, and the seconds of all models; empty before the first."""
    first = alignments[0]
    if not first.rounds:
        return ""
    kept = 1.0 - first.realigned / first.rounds
    seconds = sum(one.seconds for one in alignments)
    return (
        f"realigned before {first.realigned} of {first.rounds} rounds of several rows (grouping "
        f"rate {kept:.0%}), {seconds:.2f} s in all caches"
    )
