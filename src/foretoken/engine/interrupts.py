"""Ctrl-C between steps, never inside one: what is half committed belongs to no text."""

from __future__ import annotations

import _signal  # `signal` makes enums of handlers: ten microseconds, in every step
import threading
from collections.abc import Callable
from typing import Any


class Uninterrupted:
    """Ctrl-C waits until the end of this context, which is told whether one is waiting.

    A second one does not wait: what is running may be a caller's own code that never ends.
    """

    __slots__ = ("handler", "noted")

    def __enter__(self) -> Callable[[], bool]:
        self.noted: list[Any] = []
        self.handler: Any = None  # Python interrupts no thread but the first
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_signal.SIGINT)
            if callable(handler):
                self.handler = handler
                _signal.signal(_signal.SIGINT, self.note)
        return self.waiting

    def __exit__(self, *_: object) -> None:
        if self.handler is not None:
            _signal.signal(_signal.SIGINT, self.handler)
            if self.noted:
                self.handler(*self.noted[0])

    def note(self, number: int, frame: Any) -> None:
        """In place of the handler."""
        if self.noted:
            self.handler(number, frame)
        self.noted.append((number, frame))

    def waiting(self) -> bool:
        """Whether a Ctrl-C is."""
        return bool(self.noted)
