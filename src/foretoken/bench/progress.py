"""Progress on the terminal's error stream, so that results can be piped."""

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
    """The bar of the phase that runs now; a silent one does nothing."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.task: TaskID | None = None

    def begin(self, text: str, total: int) -> None:
        if self.progress is not None:
            if self.task is not None:
                self.progress.remove_task(self.task)
            self.task = self.progress.add_task(text, total=total)

    def say(self, text: str) -> None:
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, description=text)

    def advance(self) -> None:
        if self.progress is not None and self.task is not None:
            self.progress.advance(self.task)


@contextmanager
def shown(quiet: bool) -> Iterator[Bar]:
    """A bar, or a silent one."""
    if quiet:
        yield Bar(None)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as progress:
        yield Bar(progress)
