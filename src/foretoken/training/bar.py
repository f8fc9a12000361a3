"""What a terminal or a log shows while a model is trained, or what it learns from is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 60.0

Told = Callable[[int, str], None]  # how much is done, and what else there is to say of it
T = TypeVar("T")


class Lines:
    """A line when a stage begins, one about every minute, and its last: for logs and pipes."""

    def __init__(self, console: Console, name: str, total: int) -> None:
        self.console, self.name, self.total = console, name, total
        self.held = ""  # the newest line, until it is written
        self.written = monotonic()
        self.write(f"{name}: {total}")

    def tell(self, done: int, news: str) -> None:
        """So much is done; a line where the last one is a minute old."""
        self.held = f"{self.name}: {done}/{self.total}" + (f", {news}" if news else "")
        if monotonic() - self.written >= SECONDS_BETWEEN_LINES:
            self.close()

    def close(self) -> None:
        """Write what was told last, once."""
        if self.held:
            self.write(self.held)
            self.held, self.written = "", monotonic()

    def write(self, line: str) -> None:
        """A line, however long."""
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)


@contextmanager
def stage(name: str, total: int, show: bool, done: int = 0) -> Iterator[Told]:
    """A bar on a terminal, lines elsewhere, told of what is done; silent when not shown."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    if not show:
        yield lambda done, news: None
    elif not (console.is_interactive or console.is_jupyter):  # a dumb terminal draws none
        lines = Lines(console, name, total)
        yield lines.tell
        lines.close()
    else:
        columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[news]}", markup=False),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=console, refresh_per_second=2) as shown:
            task = shown.add_task(name, total=total, completed=done, news="")
            yield lambda done, news: shown.update(task, completed=done, news=news)


@contextmanager
def bar(name: str, steps: int, show: bool) -> Iterator[Callable[[int, float, float], None]]:
    """What a run shows, told of steps, loss and tokens per second."""
    with stage(name, steps, show) as told:

        def advance(step: int, loss: float, speed: float) -> None:
            told(step, f"loss {loss:.3f}, {speed:,.0f} tokens/s")

        yield advance


def tracked(pieces: Iterable[T], name: str, total: int, show: bool) -> Iterator[T]:
    """The pieces of a stage one after the other, each told when it is done."""
    with stage(name, total, show and total > 0) as told:
        for done, piece in enumerate(pieces, 1):
            yield piece
            told(done, "")
