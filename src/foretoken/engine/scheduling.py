"""Many threads on one engine: whoever waits for a row may run the steps, one of them at a time.

There is no thread of our own. The first caller leads: it runs steps, which decode the rows of all
callers together, until its own are done, and the next one who waits goes on. Engines over the same
model take turns step by step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from foretoken.engine.engine import Engine
from foretoken.engine.interrupts import uninterrupted
from foretoken.lm.runtime.sharing import shared_by
from foretoken.lm.views.view import innermost
from foretoken.types import DecodeState, Rows, Step


def turns_of(*models: Any) -> list[threading.RLock]:
    """The turns of models, in the one order in which everybody takes them."""
    owners = {id(owner): owner for model in models if (owner := owner_of(model)) is not None}
    return [shared_by(owners[key]).turn for key in sorted(owners)]


@contextmanager
def held(turns: Iterable[threading.RLock]) -> Iterator[None]:
    """Nobody else steps on the models of these turns inside."""
    with ExitStack() as stack:
        for turn in turns:
            stack.enter_context(turn)
        yield


def owner_of(model: Any) -> Any:
    """The module, or the table, behind a language model and its views; a module is its own."""
    lm = innermost(model)
    return lm if isinstance(lm, nn.Module) else getattr(lm, "model", lm)


class Scheduler:
    """Runs an engine for its callers."""

    def __init__(self, engine: Engine, *models: Any) -> None:
        self.engine, self.turns = engine, turns_of(engine.target, *models)
        self.changed = threading.Condition()
        self.led = False  # somebody runs the steps just now
        self.watchers: dict[int, Callable[[Step, int], None]] = {}  # by the row's uid

    @uninterrupted()
    def submit(self, rows: Rows, watch: Callable[[Step, int], None]) -> None:
        """Add rows; `watch` is told each step of one of them, and its place in the step."""
        with self.changed:
            for row in rows:
                self.watchers[row.uid] = watch
                self.engine.submit(row)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return once `ready`; until then run steps, or wait for who runs them."""
        while not ready():
            with self.changed:
                while self.led and not ready():
                    self.changed.wait()
            with uninterrupted() as interrupted:
                self.lead(lambda: ready() or interrupted())

    def lead(self, until: Callable[[], bool]) -> None:
        """Run steps, unless somebody else does."""
        with self.changed:
            if self.led:
                return
            self.led = True
        try:
            while not until():
                with held(self.turns):
                    step = self.engine.step()
                if step is not None:
                    for at, row in enumerate(step.rows):
                        self.tell(row, step, at)
                with self.changed:
                    self.changed.notify_all()
                if step is None and not until():
                    assert self.engine.idle, "rows wait and nothing moves"
                    return
        finally:
            with self.changed:
                self.led = False
                self.changed.notify_all()

    def tell(self, row: DecodeState, step: Step, at: int) -> None:
        """Tell the row's caller of a step; what that raises is the caller's own affair."""
        watch = self.watchers.get(row.uid)
        if watch is None:
            return
        try:
            watch(step, at)
        except Exception as error:
            row.fail(error)

    @uninterrupted()
    def drop(self, rows: Rows) -> None:
        """Forget rows, whatever became of them; those under way end with the next step."""
        with self.changed:
            for row in rows:
                self.watchers.pop(row.uid, None)
                self.engine.cancel(row)
            if self.led:
                return  # who leads gives their memory back
            self.led = True
        try:
            with held(self.turns):
                self.engine.sweep()
        finally:
            with self.changed:
                self.led = False
                self.changed.notify_all()
