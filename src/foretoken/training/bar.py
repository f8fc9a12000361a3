"""What a terminal shows while a model is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(name: str, steps: int, show: bool) -> Iterator[Callable[[int, float, float], None]]:
    """A progress bar, told of steps, loss and tokens per second; silent when not shown."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeRemainingColumn(),
    )
    told = Console(stderr=True)
    with Progress(*columns, console=told, disable=not show, refresh_per_second=2) as shown:
        task = shown.add_task(name, total=steps, news="")

        def advance(step: int, loss: float, speed: float) -> None:
            shown.update(task, completed=step, news=f"loss {loss:.3f}, {speed:,.0f} tokens/s")

        yield advance
