"""A server on an address until a signal ends it: gently at first, at once the second time."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from foretoken.errors import ConfigError
from foretoken.serve.heads import IDLE, protocol
from foretoken.serve.service import Service
from foretoken.serve.wire.errors import Refusal

LAST = 2  # seconds that connections get to take what was already sent


class Server(uvicorn.Server):
    """Uvicorn, but for signals: the first lets running texts end, the second ends them."""

    def __init__(self, api: FastAPI) -> None:
        self.service: Service = api.state.service
        config = uvicorn.Config(
            api,
            http=protocol(self.service.settings.request_timeout, self.turned_away),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=LAST,
        )
        super().__init__(config)
        self.signals = 0
        self.leaving: asyncio.Task[None] | None = None

    def turned_away(self, refusal: Refusal) -> None:
        """Count a connection whose request was not read so far that a gate could."""
        self.service.metrics.requests.labels("other", str(refusal.status)).inc()
        self.service.metrics.errors.labels("other", refusal.code).inc()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1
        call = self.leave if self.signals == 1 else self.leave_now
        self.loop.call_soon_threadsafe(call)

    def leave(self) -> None:
        """Take no new requests, and stop once those that run are over or their grace is."""
        self.leaving = self.loop.create_task(self._finish())

    async def _finish(self) -> None:
        await self.service.finish(self.service.settings.grace)
        self.should_exit = True

    def leave_now(self) -> None:
        """End everything."""
        self.service.end_all()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket on an address, before any weight is read."""
    try:
        if not 0 <= port < 1 << 16:  # the system would take the last 16 bits
            raise OverflowError("ports run from 0 to 65535")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise no_address(host, port, error) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise no_address(host, port, error) from error
    return sock


def no_address(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"a server at {host}:{port} was asked for.",
        f"the system says: {getattr(error, 'strerror', None) or error}.",
        "choose another --port (0: any that is free), or end what listens there.",
    )


def address_of(sock: socket.socket) -> str:
    """A socket's address as a URL."""
    address: Any = sock.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}"
