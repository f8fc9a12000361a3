"""The thread that runs the steps of a session for a server.

Steps of all requests are made here, so that the event loop never waits for a model. What they add
is handed over once per step, and wakes the loop once. Work that can wait is done a slice at a time
while nobody asks for anything.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic

from foretoken.engine.session import Session
from foretoken.engine.tolerant import Tolerant
from foretoken.lm.runtime.heap import give_back
from foretoken.serve.metrics import Counts
from foretoken.serve.writing import Piece, Writing
from foretoken.types import DecodeState

LOG = logging.getLogger(__name__)
AFTER = 5.0  # seconds without work until free memory goes back to the system
BUSY = 5.0  # and with work, else prompts and bursts leave 200 MiB; a few milliseconds each
QUIET = 0.1  # seconds without work until what can wait begins: clients answer at once, or think
AGAIN = 60.0  # seconds without work until what can wait is asked again: some of it has its time
Deliver = Callable[[list[Piece]], None]
Rest = Callable[[Callable[[], bool]], bool]


class EngineThread:
    """Runs a session's engine until it is stopped; started and stopped in an event loop."""

    def __init__(self, session: Session, counts: Counts, rest: Rest | None = None) -> None:
        """`rest`: does a slice of what can wait, and may ask whether somebody waits for it; False
        where nothing is left of it."""
        self.session, self.counts, self.rest = session, counts, rest
        self.scheduler, self.engine = session.scheduler, session.engine
        self.awake = threading.Event()
        self.stopped = False
        self.swept = monotonic()  # when free memory went back last
        self.outbox: deque[Piece] = deque()
        self.thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def start(self, deliver: Deliver) -> None:
        """Begin; `deliver` is called in this event loop with what each step added."""
        self.loop, self.deliver = asyncio.get_running_loop(), deliver
        self.stopped = False
        self.drafter = self.engine.drafter
        self.engine.drafter = Tolerant(self.drafter, self._failed)
        self.engine.listeners.append(self.counts.step)
        self.thread = threading.Thread(target=self._run, name="foretoken-engine", daemon=True)
        self.thread.start()

    async def stop(self) -> None:
        """End after the step under way, and leave the session as it was."""
        self.stopped = True
        self.awake.set()
        thread = self.thread
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, thread.join)
            self.engine.listeners.remove(self.counts.step)
            self.engine.drafter = self.drafter
            self.thread = None

    def submit(self, writings: Iterable[Writing]) -> None:
        """Add texts; from any thread."""
        for writing in writings:
            self.scheduler.submit([writing.row], writing.watch, partial(self._ended, writing))
        self.awake.set()

    def cancel(self, rows: Iterable[DecodeState]) -> None:
        """End texts before their time: the step under way is the last that they are in."""
        for row in rows:
            self.engine.cancel(row)
        self.awake.set()

    def _ended(self, writing: Writing, row: DecodeState) -> None:
        """A text is over and its figures stand still: they are counted, and its client is told."""
        try:
            self.counts.text(writing.stats)
        finally:
            writing.ended(row)

    def _failed(self, row: DecodeState, error: Exception) -> None:
        self.counts.drafter_errors += 1

    def _run(self) -> None:
        """Steps while there is work, and sleep until there is."""
        while not self.stopped:
            self._use_quiet()
            if not self.awake.wait(AFTER):
                give_back()
                while not self.awake.wait(None if self.rest is None else AGAIN):
                    self._use_quiet()
                self.swept = monotonic()  # nothing is left of before: not again with the first step
            self.awake.clear()
            try:
                self.scheduler.wait(self._ready)
            except Exception as error:  # nobody else is there to see to the rows
                self._break_down(error)
            self.scheduler.tell_ends()  # of rows that were cancelled while nobody stepped
            self._hand_over()

    def _use_quiet(self) -> None:
        """Do what can wait, until there is work; an error ends that, and no text."""
        if self.rest is None or self.awake.wait(QUIET):
            return
        try:
            while not self.awake.is_set() and self.rest(self.awake.is_set):
                pass
        except Exception as error:
            self.rest = None
            self.counts.engine_errors += 1
            LOG.error("work in an idle moment failed, and ends: %r", error, exc_info=error)

    def _ready(self) -> bool:
        """Asked after each step: hands over what it added; whether there is nothing more to do."""
        self._hand_over()
        if monotonic() - self.swept > BUSY:
            give_back()
            self.swept = monotonic()
        return self.stopped or self.engine.idle

    def _hand_over(self) -> None:
        """Give the event loop what was added since the last time."""
        batch = []
        while self.outbox:
            batch.append(self.outbox.popleft())
        if batch:
            self.loop.call_soon_threadsafe(self.deliver, batch)

    def _break_down(self, error: Exception) -> None:
        """A step failed beyond what the engine sees to: all rows end with its error."""
        self.counts.engine_errors += 1
        LOG.error("the engine failed, its texts end: %r", error, exc_info=error)
        for row in (*self.engine.running, *self.engine.filling, *self.engine.waiting):
            if row.finish is None:
                row.fail(error)
        self.engine.waiting.ends = True
        try:
            self.scheduler.drop(())  # sweeps, as nobody leads
        except Exception as again:  # this thread has to tell them all the same
            LOG.error("rows that ended could not be freed: %r", again, exc_info=again)
