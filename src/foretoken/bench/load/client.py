"""Connections to one server, and one request through one of them, timed piece by piece."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from foretoken.bench.load.address import Server
from foretoken.bench.load.events import DONE, Events, Malformed, clipped, read
from foretoken.bench.load.record import TIMEOUT, Record

# Servers close idle connections after some seconds (uvicorn after 5). One that is closed just while
# a request is put on it would count as an error of the server, so idle ones are dropped before.
IDLE_SECONDS = 2.0


class Ended(Exception):
    """An answer that ended as an error: its kind, and what the server said."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")


@dataclass(slots=True)
class Connections:
    """The pool: one connection for each request in flight, the one used last first.

    httpx could pool them itself, but gives one idle connection to all requests that wait at that
    time; all but one then ask again. Where many answers end together, as they do on a server that
    batches, the next requests were sent seconds late (64 in flight; measured).
    """

    make: Callable[[], httpx.AsyncClient]  # with room for one connection
    made: list[httpx.AsyncClient] = field(default_factory=list)
    free: list[httpx.AsyncClient] = field(default_factory=list)

    @contextmanager
    def one(self) -> Iterator[httpx.AsyncClient]:
        """A connection of one's own."""
        if not self.free:
            self.made.append(self.make())
            self.free.append(self.made[-1])
        http = self.free.pop()
        try:
            yield http
        finally:
            self.free.append(http)


@dataclass(slots=True)
class Client:
    """Requests to one server."""

    server: Server
    connections: Connections
    timeout: float

    async def get(self, path: str) -> httpx.Response:
        """What the server says of itself."""
        with self.connections.one() as http:
            return await http.get(f"{self.server.url}/{path}", timeout=self.timeout)

    async def ask(self, record: Record, path: str, body: Mapping[str, Any], zero: float) -> None:
        """Send a request and fill in its record; `zero` is when its block began.

        Whatever the server does wrong is part of the record. Cancelling ends it at once.
        """
        record.streamed = bool(body["stream"])
        record.sent = perf_counter() - zero
        try:
            async with asyncio.timeout(self.timeout):
                await self.exchange(record, path, body, zero)
        except TimeoutError:
            record.error, record.detail = TIMEOUT, f"no end after {self.timeout:g} s"
        except Ended as end:
            record.error, record.detail = end.kind, end.detail
        except Malformed as problem:
            record.error, record.detail = "malformed", str(problem)
        except (httpx.ConnectError, ssl.SSLError) as problem:
            record.error, record.detail = "not connected", clipped(str(problem))
        except httpx.RequestError as problem:
            record.error, record.detail = "disconnected", clipped(str(problem))
        record.ended = record.ended or perf_counter() - zero
        if record.counted:
            record.tokens = len(record.pieces) if record.streamed else 0

    async def exchange(
        self, record: Record, path: str, body: Mapping[str, Any], zero: float
    ) -> None:
        """The request, and its answer to the end."""
        url = f"{self.server.url}/{path}"
        with self.connections.one() as http:
            async with http.stream("POST", url, json=body) as answer:
                if answer.status_code != 200:
                    said = clipped(await answer.aread())
                    raise Ended(f"http {answer.status_code}", said)
                if record.streamed:
                    done = await self.streamed(record, answer, zero)
                else:
                    done = note(record, await answer.aread(), perf_counter() - zero)
                record.ended = perf_counter() - zero  # closing is no part of the answer
        if not done:
            raise Ended("cut off", "the stream ended without [DONE] and without a finish_reason")

    async def streamed(self, record: Record, answer: httpx.Response, zero: float) -> bool:
        """Note the events of a stream to its last byte; whether the end of the text was told."""
        reader, done = Events(), False
        async for chunk in answer.aiter_raw():
            now = perf_counter() - zero
            done = heard(record, reader.feed(chunk), now) or done
        done = heard(record, reader.end(), perf_counter() - zero) or done
        if not reader.seen:
            kind = answer.headers.get("content-type", "no content type")
            raise Malformed(f"a stream was asked for, and no event came ({kind})")
        return done


def heard(record: Record, found: Sequence[str], now: float) -> bool:
    """Put events into the record; whether one of them said that the text is finished."""
    done = False
    for data in found:
        done = data == DONE or note(record, data, now) or done
    return done


def note(record: Record, said: str | bytes, now: float) -> bool:
    """Put what one event says into the record; whether the text is finished."""
    chunk = read(said)
    if chunk.error is not None:
        raise Ended("server error", clipped(chunk.error))
    if chunk.text or (chunk.finish and not record.pieces):  # a text may end before it begins
        record.pieces.append(now)
    if chunk.usage is not None:
        tokens = chunk.usage.get("completion_tokens")
        if isinstance(tokens, int):
            record.tokens, record.counted = tokens, False
        record.prompt_tokens = chunk.usage.get("prompt_tokens", record.prompt_tokens)
    record.finish = chunk.finish or record.finish
    return chunk.finish is not None


@asynccontextmanager
async def connected(
    server: Server, timeout: float, api_key: str | None = None
) -> AsyncIterator[Client]:
    """A client of a server; its connections are closed in the end.

    Proxies of the environment are left alone: the address is the server that is measured.
    """
    limits = httpx.Limits(max_connections=1, keepalive_expiry=IDLE_SECONDS)
    secure = httpx.create_ssl_context(trust_env=False)
    headers = {"Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"

    def make() -> httpx.AsyncClient:
        return httpx.AsyncClient(
            limits=limits, headers=headers, timeout=None, trust_env=False, verify=secure
        )

    connections = Connections(make)
    try:
        yield Client(server, connections, timeout)
    finally:
        for http in connections.made:
            await http.aclose()
