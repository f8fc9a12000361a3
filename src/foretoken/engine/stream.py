"""A text told piece by piece while it is written."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from foretoken.engine.record import Recorder
from foretoken.engine.results import Piece, Result
from foretoken.engine.text import RowText
from foretoken.types import DecodeState, Step

if TYPE_CHECKING:
    from foretoken.engine.session import Session


class Stream(Iterator[Piece]):
    """Pieces of one row while it is written; `result` holds the whole once it has ended.

    The row goes on while others of the session are decoded; pieces wait until they are asked for.
    """

    def __init__(self, session: Session, row: DecodeState) -> None:
        self.session, self.row = session, row
        self.recorder = Recorder([row])
        self.pieces: deque[Piece] = deque()
        self.begun = False

    def __next__(self) -> Piece:
        if not self.begun:
            self.begun = True
            self.session.scheduler.submit([self.row], told(weakref.ref(self)))
        if not self.pieces and self.row.finish is None:
            try:
                self.session.scheduler.wait(
                    lambda: bool(self.pieces) or self.row.finish is not None
                )
            except BaseException:
                self.close()
                raise
        if not self.pieces:
            self.session.scheduler.settle()
        if self.pieces:
            return self.pieces.popleft()
        self.session.scheduler.drop([self.row])
        if self.row.error is not None:
            raise self.row.error
        raise StopIteration

    def watch(self, step: Step, at: int) -> None:
        """Keep what a step added."""
        row = self.row
        self.recorder.row(step, at)
        text = row.ended if isinstance(row.ended, RowText) else None
        trace = self.recorder.steps[row.uid][-1]
        words = "" if text is None else text.take()
        if text is not None and row.finish is not None:
            words += text.close()
        self.pieces.append(Piece(words, list(trace.emitted), trace.accepted, trace.corrected))

    def close(self) -> None:
        """Stop here and forget the row."""
        if self.begun:
            self.session.scheduler.drop([self.row])
        self.begun = True
        self.pieces.clear()
        self.session.engine.cancel(self.row)

    def __del__(self) -> None:
        """A stream that nobody reads any more keeps no row."""
        if self.row.finish is None:
            self.close()
        self.session.scheduler.watchers.pop(self.row.uid, None)

    @property
    def result(self) -> Result:
        """What was written so far, with its statistics."""
        return self.session.result(self.row, self.recorder)


def told(stream: weakref.ref[Stream]) -> Callable[[Step, int], None]:
    """Tells a stream of its steps, and does not keep it alive."""

    def watch(step: Step, at: int) -> None:
        reader = stream()
        if reader is not None:
            reader.watch(step, at)

    return watch
