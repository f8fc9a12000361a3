"""The open engine: rows join and leave between steps, prompts are fed in chunks beside them.

`submit` and `cancel` may be called from any thread at any time; `step` belongs to one thread at a
time, which `engine.scheduling` sees to. The invariant of every row that runs: all its committed
tokens but the last are cached, and the last is the root of its next tree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch

from foretoken.drafters.given_text import GivenText, foretold
from foretoken.engine.admission import Waiting
from foretoken.engine.alike import Alike, half_of
from foretoken.engine.batch_costs import batch_costs
from foretoken.engine.interrupts import Uninterrupted
from foretoken.engine.length_checks import LengthChecks
from foretoken.engine.promise import UNHEEDED, Promise, check_parts, heeds, promise_of
from foretoken.engine.step import Parts, advance, joined
from foretoken.engine.tolerant import blamed
from foretoken.errors import ForetokenError
from foretoken.row import place_processors, rewind
from foretoken.types import DecodeState, Finish, Rows, Step

Listener = Callable[[Step], None]
LOG = logging.getLogger(__name__)
CHUNK = 512  # prompt tokens fed between two steps of those that run
ALONE = 2048  # and where nobody runs


@dataclass(eq=False)
class Engine(Parts):
    """Parts that fit together (PairingError if they do not), and the rows they decode."""

    max_rows: int = 16  # decoded together; others wait
    listeners: list[Listener] = field(default_factory=list)
    waiting: Waiting = field(default_factory=Waiting)
    filling: list[DecodeState] = field(default_factory=list)  # `private[engine]`: features so far
    running: list[DecodeState] = field(default_factory=list)
    alike: Alike = field(default_factory=Alike)  # of those being filled, who waits for whom
    fed_for: float = 0.0  # seconds of prompts that no step was charged yet
    checks: LengthChecks = field(default_factory=LengthChecks)  # of lengths that texts reach
    given: GivenText | None = None  # around the drafter, once a request says what comes next
    unheeded: bool = False  # a prediction came that is not used, and that was told
    made: Step | None = None  # a step whose rows are committed, and that was not returned yet
    untried: set[int] = field(default_factory=set)  # bit lengths of batches whose trial failed

    def __post_init__(self) -> None:
        check_parts(self.target, self.drafter, self.verifier, self.controller)
        self.controller.bind(self.drafter)

    @property
    def promise(self) -> Promise:
        """The law that texts of this engine follow."""
        return promise_of(self.drafter, self.verifier, self.target)

    @property
    def heeds(self) -> bool:
        """Whether what requests say themselves of their texts is guessed."""
        return heeds(self.drafter, self.verifier, self.promise)

    @property
    def most_held(self) -> int:
        """Rows whose prompts may be cached at the same time."""
        return self.max_rows

    @property
    def idle(self) -> bool:
        """Whether no row is waiting, being filled or running."""
        return not (self.waiting or self.filling or self.running)  # the way that a row takes

    @property
    def inside(self) -> Rows:
        """The rows that have a place in the batch; any thread may ask.

        A row runs before it leaves those being filled: looked up in this order, none is missed.
        """
        return tuple(dict.fromkeys((*self.filling, *self.running)))

    def submit(self, row: DecodeState) -> None:
        """Add a row; it joins the batch at the next step that has room."""
        place_processors(row, getattr(self.target, "device", None))
        if row.prediction is not None and not (self.unheeded or self.heeds):
            self.unheeded = True
            LOG.warning(UNHEEDED)
        self.waiting.add(row)

    def cancel(self, row: DecodeState) -> None:
        """End a row before its time; its memory is given back at the next step or `sweep`."""
        if row.finish is None:
            row.finish = Finish("cancelled")
            self.waiting.ends = True

    def step(self) -> Step | None:
        """Admit, feed prompts, then one round of running rows; None when there is nobody."""
        while True:
            step, more = self.turn()
            if step is not None or not more:
                return step

    def turn(self) -> tuple[Step | None, bool]:
        """Admit, feed a chunk of prompts, then one round of the rows that run, if any do and do not
        all fail: its step, and whether there is more to do. What others wait for, as a turn with a
        model or the error of a row, comes between two of these."""
        if not torch.is_inference_mode_enabled():  # entering costs a tenth of a small model's step
            with torch.inference_mode():
                return self.turn()
        began = perf_counter()
        more = self.fill()
        self.fed_for += perf_counter() - began
        if not self.running:
            return None, more
        step = self.round(self.chosen())
        if step is None:  # every row of it failed
            self.sweep()
            return None, True
        step.times.prefill, self.fed_for = step.times.prefill + self.fed_for, 0.0
        self.made = step
        for listener in self.listeners:
            listener(step)
        self.sweep()
        self.check_lengths(step.times.context)
        self.made = None
        return step, True

    def fill(self) -> bool:
        """Forget who left, feed some prompts that are not cached yet; whether more are to be fed.

        Who came first is fed first, so that its text begins while others wait. A prompt of more
        than a chunk lets others go before its next one. Rows stay in `filling` while they are fed,
        for who looks meanwhile.
        """
        self.sweep()  # who left meanwhile is fed no chunk more, however many prompts there are
        kept = self.kept
        while row := self.admitted():
            if kept is not None and not kept.covers(row.tokens[: half_of(row)], row.owner):
                self.alike.add(row, self.filling)
            self.filling.append(row)
            self.waiting.take(row)  # now that who looks finds it here
        if not self.filling:
            return False
        together = self.filling
        try:
            fed, held = self.alike.parted(self.filling)
            count = self.portion(fed)
            together, later = fed[:count], fed[count:] + held
            if due := [row for row in together if row.finish is None and not self.whole(row)]:
                self.feed(due, CHUNK)
            for row in together:
                if row.finish is not None:
                    self.leave([row])
                elif self.target.missing(row):
                    later.append(row)
                else:
                    self.start(row)
            self.filling = later
        except BaseException:  # of whoever leads; who goes on feeds the prompts anew
            rows = [row for row in together if row not in self.running]
            self.leave(rows)
            later = [row for row in self.filling if row not in together]
            self.filling = [row for row in rows if row.finish is None] + later
            raise
        return bool(self.filling or (self.waiting and not self.running))

    def admitted(self) -> DecodeState | None:
        """The row that takes a place in the batch now, if there is one."""
        inside = (*self.running, *self.filling)
        return self.waiting.next(inside) if len(inside) < self.most_held else None

    @property
    def kept(self) -> Any:
        """What the target keeps of texts that it has read, for those that begin alike; or None."""
        return getattr(self.target, "prefixes", None)

    def portion(self, filling: Rows) -> int:
        """How many of these prompts are fed a chunk now: at least the first of them."""
        room, count = CHUNK if self.running else ALONE, 0
        keeps = self.kept is not None
        for row in filling:
            if keeps and self not in row.private:
                self.feed([row], 0)  # what is kept of its beginning is not to be fed
            room -= min(self.target.missing(row), CHUNK)
            if count and room < 0:
                break
            count += 1
        return count

    def chosen(self) -> Rows:
        """The running rows that take part in the next round."""
        return tuple(self.running)

    def whole(self, row: DecodeState) -> bool:
        """Whether the target knows a row and lacks nothing of its prompt."""
        return self in row.private and not self.target.missing(row)

    def feed(self, rows: Rows, limit: int) -> None:
        """So much of each prompt; if it fails, each is fed alone, to find the row at fault.

        Nobody knows what of them was cached by then, so each begins anew.
        """
        try:
            self.prefill(rows, limit)
        except Exception as error:
            if len(rows) == 1:
                rows[0].fail(error)
                return
            self.target.free(rows)
            for row in rows:
                row.private.pop(self, None)
                self.feed([row], limit)

    def start(self, row: DecodeState) -> None:
        """Let a row run whose prompt is cached; whatever fails there is its own affair."""
        try:
            if self.alike.awaited(row):
                self.target.keep_text(row)  # type: ignore[attr-defined]  # it does, or none waits
            fed = row.private.pop(self)
            seen = torch.cat(fed) if self.drafter.traits.taps else None
            self.drafter.start(row, seen)
            self.running.append(row)
        except Exception as error:
            row.fail(error)
            self.leave([row])

    def prefill(self, rows: Rows, limit: int) -> None:
        """Up to so many tokens of each prompt, in one forward where the model can."""
        traits, began = self.drafter.traits, perf_counter()
        fed = self.target.prefill(rows, traits.taps, limit=limit, last=traits.context)
        for row, features in zip(rows, fed, strict=True):
            seen = row.private.setdefault(self, [])
            if features is not None:
                seen.append(features)
            row.prefill += perf_counter() - began

    def round(self, rows: Rows) -> Step | None:
        """A step of all rows together; None where all failed.

        If it fails, the row whose own processor raised ends with that error and the others go on
        without it; where nobody knows whose error it is, each row tries alone. What interrupts
        whoever leads leaves the rows as they were: others go on with the step.
        """
        used = [getattr(row.coins, "used", 0) for row in rows]
        lengths = [len(row.tokens) for row in rows]
        try:
            if self.unpriced(len(rows)):
                self.try_out(rows)
            return self.advance(rows)
        except BaseException as error:
            guilty = [row for row in rows if blamed([row], error)]
            leaders = not isinstance(error, Exception) and not guilty
            torn = lengths != [len(row.tokens) for row in rows]
            if torn or (len(rows) == 1 and not leaders):
                guilty = list(rows)
            # What was committed beyond its own text would be fed again, at another place.
            guilty += [r for r in rows if r not in guilty and self.target.missing(r) < 0]
            for row in guilty:
                row.fail(error)
            if leaders:
                rewind(rows, used)
                raise
            groups = [[row for row in rows if row not in guilty]]
            if not guilty:
                LOG.warning("a step of %d rows failed, each is tried alone: %r", len(rows), error)
                groups = [[row] for row in rows]
        rewind(rows, used)
        steps = [step for group in groups if group and (step := self.round(group)) is not None]
        return joined(steps) if steps else None

    def unpriced(self, count: int) -> bool:
        """Whether a batch of so many rows is to be tried before it makes a step."""
        return count.bit_length() not in self.untried and self.controller.lacks(count)

    def try_out(self, rows: Rows) -> None:
        """Price a batch. Where that fails, mostly for want of memory, its steps need not: they go
        on by what is known of other sizes, and nothing like this batch is tried again.
        """
        used = [getattr(row.coins, "used", 0) for row in rows]
        try:
            self.price(rows)
        except Exception as error:
            if blamed(rows, error) or isinstance(error, ForetokenError):  # of a row, as its law
                raise
            rewind(rows, used)
            self.untried.add(len(rows).bit_length())  # as controllers tell sizes apart
            LOG.warning("batches of about %d rows cannot be tried: %r", len(rows), error)

    def price(self, rows: Rows) -> None:
        """Let the controller know what a batch like this costs, tried on its own rows."""
        used = [getattr(row.coins, "used", 0) for row in rows]
        # Rehearsed rows have no end of their own, and are written no further here.
        ends = max(len(r.tokens) if r.rehearsal else r.prompt_len + r.limit[0] for r in rows)
        affords = partial(self.waiting.affords, ends, rows=len(rows))
        costs = batch_costs(rows, self, affords=affords)
        rewind(rows, used)
        LOG.debug("costs of %d rows: %s", len(rows), costs)
        self.controller.learn(costs)

    def advance(self, rows: Rows) -> Step:
        """One round of this kind of engine."""
        if any(foretold(row) for row in rows):
            return advance(rows, self.with_given())
        return advance(rows, self)

    def with_given(self) -> Parts:
        """The parts of a step in which requests say themselves what comes next."""
        if not self.heeds:
            return self
        if self.given is None or self.given.inner is not self.drafter:
            self.given = GivenText(self.drafter)
        return Parts(self.target, self.given, self.verifier, self.controller)

    def check_lengths(self, longest: int) -> None:
        """Have the target check itself where a row is twice as long as any that was checked."""
        inside = self.running, self.filling, self.waiting
        for row in self.checks.due(self.running, longest, self.target.verified, inside):
            try:
                if not self.waiting.affords_check(len(row.tokens), len(self.running)):
                    raise MemoryError("its budget has no room for a forward without a cache")
                self.target.self_check(row)
            except ForetokenError as error:
                row.fail(error)
            except Exception as error:  # of memory, mostly: the text is no worse for that
                self.checks.unverified = len(row.tokens)
                LOG.warning("a text of %d tokens could not be checked: %s", len(row.tokens), error)

    def sweep(self) -> None:
        """Forget rows that ended or were cancelled."""
        # Others cancel and submit meanwhile: whether a row is over is asked once, or it were lost.
        over = [row for row in (*self.running, *self.filling) if row.finish is not None]
        over += self.waiting.ended()
        if over:
            gone = set(over)
            self.running = [row for row in self.running if row not in gone]
            self.filling = [row for row in self.filling if row not in gone]
            self.waiting.remove(over)
            self.leave(over)

    def leave(self, rows: Rows) -> None:
        """Give back what drafter and target hold of rows."""
        problem = None
        for row in rows:
            try:
                self.drafter.finish(row)
            except BaseException as error:  # the others have to be let go of all the same
                problem = problem or error
        try:
            self.target.free(rows)
        finally:
            for row in rows:
                row.private.clear()
                self.alike.forget(row)
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Cancel everybody."""
        for row in (*self.running, *self.filling, *self.waiting):
            self.cancel(row)
        self.sweep()


def decode(
    rows: Iterable[DecodeState], engine: Engine, max_rows: int | None = None
) -> Generator[Step]:
    """Run rows to their end: all there is to a batch. Closing the generator early frees them.

    An exception that ends one of them ends the batch.
    """
    rows = list(rows)
    if max_rows is not None:
        engine.max_rows = max_rows
    try:
        for row in rows:
            engine.submit(row)
        more = True
        while more:
            with Uninterrupted(), torch.inference_mode():
                step, more = engine.turn()
            raise_error(rows)
            if step is not None:
                yield step
    finally:
        with Uninterrupted():
            for row in rows:
                engine.cancel(row)
            engine.sweep()


def raise_error(rows: Iterable[DecodeState]) -> None:
    """Raise what ended one of the rows, unchanged, where that was an exception."""
    for row in rows:
        if row.error is not None:
            raise row.error
