"""Ctrl-C between steps, never inside one: what is half committed belongs to no text."""

from __future__ import annotations

import _signal  # `signal` makes enums of handlers: ten microseconds, in every step
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits until the end of this context, which is told whether one is waiting.

    A second one does not wait: what is running may be a caller's own code that never ends.
    """
    handler = _signal.getsignal(_signal.SIGINT)
    noted: list[Any] = []

    def note(number: int, frame: Any) -> None:
        if noted and callable(handler):
            handler(number, frame)
        noted.append((number, frame))

    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: False  # Python interrupts no other thread
        return
    try:
        _signal.signal(_signal.SIGINT, note)
        yield lambda: bool(noted)
    finally:
        _signal.signal(_signal.SIGINT, handler)
        if noted:
            handler(*noted[0])
