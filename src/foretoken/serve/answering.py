"""A response that is written while its texts are: a stream of events, or one document at the end.

Whoever leaves before the end is noticed at once, and the rows are freed with the step under way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from foretoken.serve.answer import LEFT, Answer
from foretoken.serve.service import Service
from foretoken.serve.wire.errors import TIMEOUT, Refusal
from foretoken.serve.wire.words import DONE, event, words_for

UNREAD = 60.0  # seconds that a message waits for a client that does not read
UNREAD_LATE = 5.0  # likewise, behind the time limit
ALIVE = 15.0  # seconds without a byte of a stream, as proxies end one after 60
KEEP_ALIVE = ": keep-alive\n\n"  # a comment of the stream, which its readers pass over
LONG_ANSWER = 2048  # tokens told of from which on a document is written beside the event loop
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Answering(Response):
    """Has an answer written, and sends it."""

    def __init__(self, service: Service, answer: Answer) -> None:
        super().__init__(media_type="application/json")
        self.service, self.answer = service, answer
        self.words = words_for(service, answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(until_gone(receive))
        gone.add_done_callback(self._left)
        timer, send = self._timer(), self._bounded(send)
        try:
            await self._begin()
            if not self.answer.gone:
                await (self._stream(send) if self.answer.wants.pieces else self._whole(send))
        except OSError:  # of the connection, or nobody reads: nobody is there to be told
            self.answer.leave()
            why = self.answer.refusal
            self.answer.account.facts["error"] = LEFT if why is None else why.code or why.kind
        finally:
            gone.cancel()
            if timer is not None:
                timer.cancel()
            self.service.leave(self.answer)

    def _left(self, gone: asyncio.Task[None]) -> None:
        if not gone.cancelled():
            self.answer.leave()

    def _timer(self) -> asyncio.TimerHandle | None:
        """Ends the answer once its time is up."""
        limit = self.service.settings.request_timeout
        if limit is None:
            return None
        return asyncio.get_running_loop().call_later(limit, self.answer.end, timed_out(limit))

    def _bounded(self, send: Send) -> Send:
        """`send`, which raises TimeoutError where nobody reads: for so long, or too late."""
        limit, clock = self.service.settings.request_timeout, asyncio.get_running_loop().time
        end = math.inf if limit is None else clock() + limit

        async def bounded(message: Message) -> None:
            now = clock()
            async with asyncio.timeout_at(min(now + UNREAD, max(end, now) + UNREAD_LATE)):
                await send(message)

        return bounded

    async def _begin(self) -> None:
        """Checked rows; what is wrong with the request is raised before anything is sent.

        Whoever left or was refused meanwhile waits for no thread, and holds none back.
        """
        service, answer = self.service, self.answer
        limit = service.settings.max_tokens_limit
        job = asyncio.get_running_loop().run_in_executor(
            service.preparers, answer.begin, service.counts.plain, limit
        )
        await answer.until(job)
        if not job.done():
            job.cancel()  # `begin` itself looks whether all is over, where it runs already
        elif (error := job.exception()) is not None:  # an OSError, too: here it is no connection's
            raise service.blame(error) from error
        if answer.refusal is not None and not answer.writings:
            raise answer.refusal

    async def _stream(self, send: Send) -> None:
        answer, words = self.answer, self.words
        await send(start(200, {**STREAM_HEADERS, **lossy_header(self.service)}))
        if opening := await self._written(words.opened):
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        while True:
            pieces = await answer.take(ALIVE)
            told = "".join([words.told(piece) for piece in pieces])
            if told:
                await send(body(told, more=True))
            if answer.done:
                break
            if not pieces:
                await send(body(KEEP_ALIVE, more=True))
        told = "".join([words.told(piece) for piece in await answer.take()])
        if answer.refusal is not None:
            self.answer.account.facts["error"] = answer.refusal.code or answer.refusal.kind
            told += event(answer.refusal.to_dict()) + DONE
        else:
            told += words.closed()
        if not answer.gone:
            await send(body(told, more=False))

    async def _whole(self, send: Send) -> None:
        await self.answer.whole()
        if self.answer.gone:
            return
        document = await self._written(self.words.document)
        if self.answer.gone:
            return
        headers = {"content-type": "application/json", "content-length": str(len(document))}
        await send(start(200, {**headers, **lossy_header(self.service)}))
        await send({"type": "http.response.body", "body": document})

    async def _written(self, write: Callable[[], str]) -> bytes:
        """What `write` tells; something long takes seconds, in which others are answered."""

        def written() -> bytes:
            return write().encode()

        if self.answer.entries < LONG_ANSWER:
            return written()
        return await asyncio.get_running_loop().run_in_executor(None, written)


async def until_gone(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def start(status: int, headers: dict[str, str]) -> dict[str, Any]:
    """The beginning of a response."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


def body(text: str, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def lossy_header(service: Service) -> dict[str, str]:
    """A header that says which law a text does not follow."""
    if service.lossy is None:
        return {}
    return {"x-foretoken-lossy": service.lossy.encode("ascii", "replace").decode()}


def timed_out(limit: float) -> Refusal:
    return Refusal(
        f"the request took longer than {limit:g} s.",
        f"this server ends requests after {limit:g} s.",
        "ask for fewer tokens, or when the server has less to do.",
        status=504,
        kind="server_error",
        code=TIMEOUT,
    )
