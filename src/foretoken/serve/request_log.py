"""The request log: a line of JSON per request, written behind the back of the event loop.

What cannot be written, on a full disk or to a file that is gone, is counted and given up: a log
never stops a server.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any

from foretoken.errors import ConfigError
from foretoken.serve.gate import REQUESTS

WAITING = 10_000  # lines that may wait for a slow disk
CLOSING = 2.0  # seconds that these may take at the end

STDERR = 2


class Lines(logging.Handler):
    """Writes records to a file, each as one line of JSON, with nothing kept back."""

    def __init__(self, descriptor: int, failed: Callable[[], None]) -> None:
        super().__init__()
        self.descriptor, self.failed = descriptor, failed
        self.torn = False  # a line was written in part

    def emit(self, record: logging.LogRecord) -> None:
        line = memoryview(("\n" * self.torn + line_of(record)).encode())
        left = line
        try:
            while left:
                left = left[os.write(self.descriptor, left) :]
            self.torn = False
        except OSError:
            self.torn = self.torn if left is line else True
            self.failed()


class Waiting(QueueHandler):
    """Hands records over to the thread that writes them; more than may wait are given up."""

    def __init__(self, queue: Queue[Any], failed: Callable[[], None]) -> None:
        super().__init__(queue)
        self.failed = failed

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def handleError(self, record: logging.LogRecord) -> None:
        self.failed()


def line_of(record: logging.LogRecord) -> str:
    """A record as a line; its time is the only thing that a jump of the clock can change."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    told = {"time": f"{seconds}.{int(record.msecs):03d}Z", **getattr(record, "request", {})}
    return json.dumps(told) + "\n"  # in ASCII: other signs end lines, too


class RequestLog:
    """Where records of requests are written while it is open."""

    def __init__(self, path: Path | None, failed: Callable[[], None]) -> None:
        self.descriptor = STDERR if path is None else opened(path)
        queue: Queue[Any] = Queue(WAITING)
        self.waiting = Waiting(queue, failed)
        self.listener = QueueListener(queue, Lines(self.descriptor, failed))

    def open(self) -> None:
        """Take records from now on, of all that is served in this process."""
        self.listener.start()
        REQUESTS.addHandler(self.waiting)
        REQUESTS.setLevel(logging.INFO)
        REQUESTS.propagate = False

    def close(self) -> None:
        """Write what is left, unless nobody takes it: a full pipe holds no server back."""
        REQUESTS.removeHandler(self.waiting)
        REQUESTS.propagate = True
        REQUESTS.setLevel(logging.NOTSET)
        last = Thread(target=self._write_rest, name="foretoken-log-end", daemon=True)
        last.start()
        last.join(CLOSING)

    def _write_rest(self) -> None:
        with suppress(Full):  # the writer waits with as many lines as may: it gets no more
            self.listener.stop()
            if self.descriptor != STDERR:
                os.close(self.descriptor)


def opened(path: Path) -> int:
    """A file to be added to; made where there is none."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"a request log at {path} was asked for.",
            f"the system says: {error.strerror or error}.",
            "name a file in a folder that exists and may be written.",
        ) from error
