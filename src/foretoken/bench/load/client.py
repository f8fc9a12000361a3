"""One connection pool to one server, and one request through it, timed piece by piece."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx

from foretoken.bench.load.address import Server
from foretoken.bench.load.events import DONE, Events, Malformed, clipped, read
from foretoken.bench.load.record import Record

# Servers close idle connections after some seconds (uvicorn after 5). One that is closed just while
# a request is put on it would count as an error of the server, so idle ones are dropped before.
IDLE_SECONDS = 2.0


class Ended(Exception):
    """An answer that ended as an error: its kind, and what the server said."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")


@dataclass(slots=True)
class Client:
    """Requests to one server."""

    server: Server
    http: httpx.AsyncClient
    timeout: float

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
            record.error, record.detail = "timeout", f"no end after {self.timeout:g} s"
        except Ended as end:
            record.error, record.detail = end.kind, end.detail
        except Malformed as problem:
            record.error, record.detail = "malformed", str(problem)
        except (httpx.ConnectError, ssl.SSLError) as problem:
            record.error, record.detail = "not connected", clipped(str(problem))
        except httpx.RequestError as problem:
            record.error, record.detail = "disconnected", clipped(str(problem))
        record.ended = perf_counter() - zero
        if record.counted:
            record.tokens = len(record.pieces) if record.streamed else 0

    async def exchange(
        self, record: Record, path: str, body: Mapping[str, Any], zero: float
    ) -> None:
        """The request, and its answer to the end."""
        url = f"{self.server.url}/{path}"
        async with self.http.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                said = clipped(await answer.aread())
                raise Ended(f"http {answer.status_code}", said)
            if record.streamed:
                done = await self.streamed(record, answer, zero)
            else:
                done = note(record, await answer.aread(), perf_counter() - zero)
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
    server: Server, most: int, timeout: float, api_key: str | None = None
) -> AsyncIterator[Client]:
    """A client with room for `most` requests at once.

    Proxies of the environment are left alone: the address is the server that is measured.
    """
    limits = httpx.Limits(
        max_connections=most, max_keepalive_connections=most, keepalive_expiry=IDLE_SECONDS
    )
    headers = {"Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    async with httpx.AsyncClient(
        limits=limits, headers=headers, timeout=None, trust_env=False
    ) as http:
        yield Client(server, http, timeout)
