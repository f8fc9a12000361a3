"""One text of a request while it is written: what each step added, for whoever reads it.

`watch` and `ended` are called by the thread that runs the steps; what they hand over is read in the
event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from foretoken.engine.record import Recorder, Stats, StepTrace, trace_of
from foretoken.engine.session import Session
from foretoken.engine.text import RowText, reader_of
from foretoken.serve.estimate import Estimate, PlainSteps
from foretoken.serve.logprobs import Chosen, chosen_tokens
from foretoken.serve.noted_text import NotedText, Segment
from foretoken.types import DecodeState, Step, TokenTree

GUESSED, CORRECTED, OWN = "guessed", "corrected", "own"


@dataclass(frozen=True, slots=True)
class Wants:
    """What a request wants to be told of each text."""

    pieces: bool  # as it is written, and not only at the end
    logprobs: int | None = None  # likeliest tokens beside each; None: no logarithms at all
    speculation: bool = False

    @property
    def tokens(self) -> bool:
        """Whether it matters which token brought which characters."""
        return self.logprobs is not None or self.speculation


@dataclass(frozen=True, slots=True)
class Drafted:
    """What was guessed in a step, and what of it stands."""

    trace: StepTrace
    tree: TokenTree
    path: tuple[int, ...]


@dataclass(slots=True)
class Piece:
    """What became readable of a text."""

    writing: Writing
    text: str
    segments: list[Segment] = field(default_factory=list)
    chosen: list[tuple[Chosen, int]] = field(default_factory=list)  # with offsets in the text
    drafted: Drafted | None = None
    over: bool = False  # nothing follows


class Writing:
    """A row, and what is told of it."""

    def __init__(
        self,
        session: Session,
        row: DecodeState,
        index: int,
        wants: Wants,
        plain: PlainSteps,
        post: Callable[[Piece], None],
        put: Callable[[Piece], None],
    ) -> None:
        self.session, self.row, self.index, self.wants = session, row, index, wants
        self.post = post  # called in the thread that runs the steps, with what one added
        self.put = put  # called with the same in the event loop
        self.recorder = Recorder([row])
        self.estimate = Estimate(plain)
        self.kinds: list[str] = []  # by token
        self.chosen: list[Chosen] = []  # by token
        self.told = 0  # characters
        self.first: float | None = None  # when the first token was there, on the monotonic clock
        self.last: float | None = None
        self.begun = 0  # tokens that came with the first
        row.ended = self._reader(row)

    def _reader(self, row: DecodeState) -> Any:
        """What reads the row's tokens: as little as is needed for what is wanted."""
        text = row.ended
        if self.wants.tokens:
            return reader_of(row, self.session.tokenizer, NotedText)
        if text is None and self.wants.pieces:
            return reader_of(row, self.session.tokenizer, RowText)
        return text

    @property
    def stats(self) -> Stats:
        return self.recorder.stats[self.row.uid]

    @property
    def text(self) -> str:
        """The whole text of a row that is over."""
        return self.session.result(self.row, self.recorder).text

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        reason = "length" if self.row.finish is None else self.row.finish.reason
        return "stop" if reason == "stop" else "length"

    def watch(self, step: Step, at: int) -> None:
        """Take in what a step did to the row."""
        emitted, row = step.emitted[at], self.row
        self.last = perf_counter()
        if self.first is None:
            self.first, self.begun = self.last, len(emitted)
        self.recorder.row(step, at)
        self.estimate.step(step, len(emitted))
        if self.wants.logprobs is not None:
            self.chosen += chosen_tokens(step, at, self.wants.logprobs)
        drafted = None
        if self.wants.speculation:
            drafted = Drafted(trace_of(step, at), step.drafts[at].tree, step.verdicts[at].path)
            self.kinds += kinds_of(drafted.trace)
        if self.wants.pieces:
            piece = self._piece(row.finish is not None)
            piece.drafted = drafted
            if piece.text or piece.segments or drafted is not None:
                self.post(piece)

    def ended(self, row: DecodeState) -> None:
        """The row is over: what is left of its text, and the end."""
        piece = Piece(self, "")
        try:
            if self.wants.pieces:
                piece = self._piece(True)
        finally:  # whatever that raises: whoever waits has to be told of the end
            piece.over = True
            self.post(piece)

    def whole_chosen(self) -> list[tuple[Chosen, int]]:
        """All tokens of a text that is over, with their places in it."""
        reader = self.row.ended
        assert isinstance(reader, NotedText)
        reader.close()
        segments = reader.segments(len(reader.text))
        return [(self.chosen[one.at], one.offset) for one in segments]

    def _piece(self, whole: bool) -> Piece:
        """What was decided since the last piece, with what is told of its tokens."""
        reader = self.row.ended
        if not isinstance(reader, RowText):
            return Piece(self, "")
        words = reader.take()
        if whole:
            words += reader.close()
        self.told += len(words)
        if not isinstance(reader, NotedText):
            return Piece(self, words)
        segments = reader.segments(self.told)
        chosen = []
        if self.wants.logprobs is not None:
            known = len(self.chosen)  # a step that failed behind its tokens was never told
            chosen = [
                (self.chosen[one.at], one.offset)
                for one in segments
                if one.first and one.at < known
            ]
        return Piece(self, words, segments, chosen)


def kinds_of(trace: StepTrace) -> list[str]:
    """Where each token of a step came from."""
    own = CORRECTED if trace.corrected else OWN
    return [GUESSED] * trace.accepted + [own] * (len(trace.emitted) - trace.accepted)
