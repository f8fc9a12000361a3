"""Connections that wait for the head of a request so long, and read so many bytes of it.

Uvicorn alone waits for ever for who sends nothing, or half a head; and httptools keeps a head of
any size, before any key or limit of ours is looked at.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from importlib.util import find_spec
from typing import Any

from foretoken.serve.wire.errors import Refusal, late_head, long_head

LONGEST = 1 << 16  # bytes of a head, as h11 has it
WAITING = 60.0  # most seconds that one may take
IDLE = (
    75  # that idle connections stay open: above the 60 of usual proxies, or these use closed ones
)
LOOK = 0.05  # further seconds, in which a loop that was held up reads what had come in time


Tell = Callable[[Refusal], None]


class Timed(asyncio.Protocol):
    """What a protocol of uvicorn's gets before it: heads have to come in time."""

    seconds = WAITING
    tell: Tell  # of what no gate sees
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any  # the request read last, once there is one
    heard = False  # anything at all has come
    head_timer: asyncio.TimerHandle | None = None

    def reading_head(self) -> bool:
        """Whether a first head is waited for, or a part of one has come."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.wait_for_head(IDLE)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if not self.heard:  # what is timed from here on is a head
            self.heard = True
            self.stop_waiting()
        super().data_received(data)
        if self.cycle is not before:  # a head came to its end: what is timed now is the next one
            self.stop_waiting()
        self.watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_waiting()
        super().connection_lost(exc)

    def watch_head(self) -> None:
        """Begin to wait for the end of a head, or stop where there is none."""
        if self.transport.is_closing() or not self.reading_head():
            self.stop_waiting()
        elif self.head_timer is None:
            self.wait_for_head()

    def wait_for_head(self, seconds: float | None = None) -> None:
        self.head_timer = self.loop.call_later(seconds or self.seconds, self.look_again)

    def stop_waiting(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def look_again(self) -> None:
        self.head_timer = self.loop.call_later(LOOK, self.head_late)

    def head_late(self) -> None:
        """Leave who does not send; one that is being answered may be unread by us meanwhile."""
        self.head_timer = None
        if self.answering():
            self.wait_for_head()
        elif self.heard:
            self.refuse(late_head(self.seconds))
        else:
            self.transport.close()

    def answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def refuse(self, refusal: Refusal) -> None:
        """End a connection, and say why where that is not written into another answer."""
        if self.transport.is_closing():
            return
        self.tell(refusal)
        if not self.answering():
            document = json.dumps(refusal.to_dict()).encode()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(document)),
                "connection": "close",
                **refusal.headers,
            }
            lines = [f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + document)
        self.transport.close()


def protocol(seconds: float | None, tell: Tell) -> type[asyncio.Protocol]:
    """The faster parser that is installed; a head may take so many seconds, a minute at most.

    `tell` hears of the connections that are refused.
    """
    limit = min(seconds or WAITING, WAITING)
    make = with_h11 if find_spec("httptools") is None else with_httptools
    return make(limit, tell)


def with_h11(limit: float, told: Tell) -> type[asyncio.Protocol]:
    """It bounds heads itself."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class ByH11(Timed, H11Protocol):
        seconds, tell = limit, staticmethod(told)

        def reading_head(self) -> bool:
            if self.conn.their_state is not h11.IDLE:
                return False
            return self.cycle is None or bool(self.conn.trailing_data[0])

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.watch_head()  # it was kept unread until then

    return ByH11


def with_httptools(limit: float, told: Tell) -> type[asyncio.Protocol]:
    """It keeps what it is sent, so bytes are counted for as long as nothing comes of them."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class ByHttptools(Timed, HttpToolsProtocol):
        seconds, tell = limit, staticmethod(told)
        in_head = True
        between = False  # whatever comes next begins a head
        pending = 0  # bytes since a head began or ended, or a part of a body came
        piece = 0  # bytes that came last and are of no finished head or body yet

        def reading_head(self) -> bool:
            return self.in_head

        def data_received(self, data: bytes) -> None:
            if self.between:
                self.in_head, self.between = True, False
            self.piece = len(data)
            self.pending += self.piece
            super().data_received(data)
            if self.pending > LONGEST and self.answering():
                self.flow.pause_reading()  # until that is over: it is not to be broken off
            elif self.pending > LONGEST:
                self.refuse(long_head(LONGEST))

        def send_400_response(self, msg: str) -> None:
            if self.pending <= LONGEST:  # else it is refused for its length
                super().send_400_response(msg)

        def on_message_begin(self) -> None:
            self.in_head, self.between, self.pending = True, False, self.piece
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            self.pending = size  # more may have come with it
            if size > LONGEST:
                raise long_head(LONGEST)  # ends the reading: httptools hands it to uvicorn
            self.in_head, self.pending, self.piece = False, 0, max(self.piece - size, 0)
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self.pending, self.piece = 0, max(self.piece - len(body), 0)
            super().on_body(body)

        def on_message_complete(self) -> None:
            self.between, self.pending = True, 0
            super().on_message_complete()

    return ByHttptools
