"""Progress on the error stream, so that results can be piped: a bar on a terminal, else lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bar:
    """The stage that runs now, in silence: the base of the two that tell."""

    def begin(self, text: str, total: int) -> None:
        """A stage of so many pieces starts."""

    def say(self, text: str) -> None:
        """The piece at work."""

    def advance(self) -> None:
        """A piece is done."""


class Lines(Bar):
    """A line per stage, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def begin(self, text: str, total: int) -> None:
        self.console.print(f"{text}: {total}", markup=False, highlight=False)


class Drawn(Bar):
    """A bar that moves, for terminals."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task: TaskID | None = None

    def begin(self, text: str, total: int) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(text, total=total)

    def say(self, text: str) -> None:
        if self.task is not None:
            self.progress.update(self.task, description=text)

    def advance(self) -> None:
        if self.task is not None:
            self.progress.advance(self.task)


@contextmanager
def shown(quiet: bool) -> Iterator[Bar]:
    """A bar on a terminal, lines elsewhere, or silence."""
    console = Console(stderr=True)
    if quiet:
        yield Bar()
    elif not console.is_interactive:  # a dumb terminal draws no bar
        yield Lines(console)
    else:
        with Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        ) as progress:
            yield Drawn(progress)
