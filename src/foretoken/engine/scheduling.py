"""Many threads on one engine: whoever waits for a row may run the steps, one of them at a time.

There is no thread of our own. The first caller leads: it runs steps, which decode the rows of all
callers together, until its own are done, and the next one who waits goes on. Engines over the same
model take turns step by step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from foretoken.engine.engine import Engine
from foretoken.engine.interrupts import Uninterrupted
from foretoken.errors import ConfigError
from foretoken.lm.runtime.sharing import shared_by
from foretoken.lm.views.view import innermost
from foretoken.types import DecodeState, Rows, Step

Turns = Sequence[threading.RLock]


def turns_of(*models: Any) -> list[threading.RLock]:
    """The turns of models, in the one order in which everybody takes them."""
    owners = {id(owner): owner for model in models if (owner := owner_of(model)) is not None}
    return [shared_by(owners[key]).turn for key in sorted(owners)]


class Inside(threading.local):
    """The turns that this thread holds, or that are held for it."""

    def __init__(self) -> None:
        self.turns: list[threading.RLock] = []
        self.lent: Turns = ()  # of these, what another thread holds that waits for this one


_inside = Inside()
# With dropped rows, whose memory is held until some turn is given back: the garbage collector drops
# streams at any place, in the middle of a forward too, and in threads that others wait for. A
# dictionary, whose single operations no other thread and no garbage collector interrupts.
_left: dict[int, Scheduler] = {}


@contextmanager
def held(turns: Iterable[threading.RLock]) -> Iterator[None]:
    """Nobody else steps on the models of these turns inside."""
    try:
        with ExitStack() as stack:
            taken(turns, stack)
            yield
    finally:
        sweep_what_was_left()


def turns_here() -> Turns:
    """The turns that this thread works inside."""
    return tuple(_inside.turns)


@contextmanager
def lent(turns: Turns) -> Iterator[None]:
    """This thread works inside turns of another one, which waits for it: to ask for one of them is
    to wait for oneself, and refused here as it is there.
    """
    before = _inside.turns, _inside.lent
    _inside.turns, _inside.lent = list(turns), turns
    try:
        yield
    finally:
        _inside.turns, _inside.lent = before


def taken(turns: Iterable[threading.RLock], stack: ExitStack, wait: bool = True) -> bool:
    """Take these turns until the stack is left; False, and none, where one would be waited for."""
    for turn in turns:
        if wait and turn in _inside.lent:
            raise step_within_a_step()
        if not turn.acquire(blocking=wait):
            stack.close()
            return False
        stack.callback(turn.release)
        _inside.turns.append(turn)
        stack.callback(_inside.turns.pop)
    return True


def sweep_what_was_left() -> None:
    """Give back the memory of rows that were dropped while some turn was taken."""
    for key in [] if _inside.turns else list(_left):
        if (one := _left.pop(key, None)) is not None:
            one.drop(())  # in vain where another has its turn: then it comes back here


def owner_of(model: Any) -> Any:
    """The module, or the table, behind a language model and its views; a module is its own."""
    lm = innermost(model)
    return lm if isinstance(lm, nn.Module) else getattr(lm, "model", lm)


class Scheduler:
    """Runs an engine for its callers."""

    def __init__(self, engine: Engine, *models: Any) -> None:
        self.engine, self.turns = engine, turns_of(engine.target, *models)
        self.models: list[Any] = [innermost(model) for model in (engine.target, *models)]
        self.changed = threading.Condition()
        self.led = False  # somebody runs the steps just now
        self.again = False  # somebody dropped rows while it was led
        self.steps = 0  # that were told to their callers
        self.submissions = 0
        self.stepping: int | None = None  # the thread that makes or tells one just now
        self.watchers: dict[int, Callable[[Step, int], None]] = {}  # by the row's uid
        self.ends: dict[DecodeState, Callable[[DecodeState], None]] = {}  # whom to tell of its end

    def submit(
        self,
        rows: Rows,
        watch: Callable[[Step, int], None],
        ended: Callable[[DecodeState], None] | None = None,
    ) -> None:
        """Add rows; `watch` is told each step of one of them, and its place in the step.

        `ended` is told once of each row that is over, after its last step and whatever ended it,
        by the thread that runs the steps; not of rows that were dropped.
        """
        with Uninterrupted(), self.changed:
            self.submissions += 1
            for row in rows:
                self.watchers[row.uid] = watch
                if ended is not None:
                    self.ends[row] = ended
                self.engine.submit(row)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return once `ready`; until then run steps, or wait for who runs them."""
        if any(turn in _inside.turns for turn in self.turns):
            raise step_within_a_step()
        while not ready():
            with self.changed:
                while self.led and not ready():
                    self.changed.wait()
            with Uninterrupted() as interrupted:
                self.lead(lambda: ready() or interrupted())

    @torch.inference_mode()  # once for all steps
    def lead(self, until: Callable[[], bool]) -> None:
        """Run steps, unless somebody else does."""
        with self.changed:
            if self.led:
                return
            self.led = True
        try:
            while not until():
                with self.changed:  # a row that was counted is there, too
                    self.stepping, before = threading.get_ident(), self.submissions
                moved = self.step()
                self.tell_ends()
                with self.changed:
                    self.steps, self.stepping = self.steps + 1, None
                    self.changed.notify_all()
                if not moved and not until():
                    if self.engine.idle:
                        return
                    assert self.submissions > before, "rows wait and nothing moves"
        finally:
            with self.changed:
                self.led, self.stepping = False, None
                again, self.again = self.again, False
                self.changed.notify_all()
            if again:  # rows may have been dropped behind its last step
                self.drop(())

    def step(self) -> bool:
        """One step, or a chunk of prompts before it, told to the callers of its rows; whether there
        may be another.

        Its logits are given back before the next one is made.
        """
        try:
            with held(self.turns):
                self.check_models()
                step, more = self.engine.turn()
        except BaseException:  # of a listener, or of a row's end: the texts of all others went on
            made, self.engine.made = self.engine.made, None
            self.tell_all(made)
            raise
        self.tell_all(step)
        return more

    def settle(self) -> None:
        """Return once the step under way in another thread was told: it may have ended a row."""
        with self.changed:
            told = self.steps
            while self.stepping not in (None, threading.get_ident()) and self.steps == told:
                self.changed.wait()

    def check_models(self) -> None:
        """ConfigError where a model was closed, or set to training mode, under rows that run."""
        for lm in self.models:
            if getattr(lm, "closed", False) or getattr(owner_of(lm), "training", False):
                lm.check_usable()

    def tell_all(self, step: Step | None) -> None:
        """Tell the callers of all rows of a step, if one was made."""
        if step is not None:
            for at, row in enumerate(step.rows):
                self.tell(row, step, at)

    def tell(self, row: DecodeState, step: Step, at: int) -> None:
        """Tell the row's caller of a step; what that raises is the caller's own affair."""
        watch = self.watchers.get(row.uid)
        if watch is None:
            return
        try:
            watch(step, at)
        except Exception as error:
            row.fail(error)

    def tell_ends(self) -> None:
        """Tell of rows that are over by now."""
        with self.changed:
            over = [(row, self.ends.pop(row)) for row in tuple(self.ends) if row.finish is not None]
        for row, ended in over:
            self.watchers.pop(row.uid, None)
            try:
                ended(row)
            except Exception as error:  # others are still to be told of theirs
                row.fail(error)

    def drop(self, rows: Rows) -> None:
        """Forget rows, whatever became of them; those under way end with the next step."""
        with Uninterrupted():
            with self.changed:
                for row in rows:
                    self.watchers.pop(row.uid, None)
                    self.ends.pop(row, None)
                    self.engine.cancel(row)
                if self.led:  # who leads may have made its last step, and looks behind it
                    self.again = True
                    return
                _left[id(self)] = self  # before the attempt: whoever has a turn looks behind it
                if _inside.turns:
                    return
                self.led, self.again = True, False
            try:
                with ExitStack() as stack:
                    free = taken(self.turns, stack, wait=False)
                    if free:
                        _left.pop(id(self), None)
                        self.engine.sweep()
            finally:
                with self.changed:
                    self.led = False
                    again, self.again = self.again, False
                    self.changed.notify_all()
            if free:
                sweep_what_was_left()
            if again:  # in vain, as it was led here: whoever had the turn may be gone
                self.drop(())


def step_within_a_step() -> ConfigError:
    return ConfigError(
        "a text was asked for by code that runs inside a step of the same model.",
        "logits processors and stopping criteria are called between two halves of a step, and the "
        "next step waits for them.",
        "ask a session over another model, or ask before the text is begun.",
    )
