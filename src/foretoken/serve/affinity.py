"""Which conversation a request goes on with, told to the router by a header.

A replica keeps keys and values of texts that are over; a request that begins as one of them is
answered soonest where that one was. Plain ASGI, in the proxy that all requests pass.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.gate import answer_with
from foretoken.serve.wire.errors import Refusal, stopping
from foretoken.serve.wire.words import DONE, event

HEADER = b"x-session-id"  # the router sends equal ones to the same replica
REPLICA = b"x-foretoken-replica"  # who answered; without it the router itself did
REQUEST_ID = b"x-request-id"
NO_SUCH_APPLICATION, LOST, UNAVAILABLE = 404, 500, 503  # statuses of the router
FULL = b"backpressure"  # in what it says with 503 where too many wait, and not where nobody answers
EVENTS = b"text/event-stream"
ASKS = ("/v1/completions", "/v1/chat/completions")
LONGEST = 1 << 20  # bytes of a body that are read; longer than the context of any model
BEGINNING = 256  # characters of a prompt that count; those of a chat count to its first question


class Affinity:
    """Names the conversation of each request that does not name it itself.

    What the router answers in the place of a replica is told as OpenAI clients read it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ASKS:
            await self.app(scope, receive, send)
            return
        read: list[Message] = []
        if all(name != HEADER for name, _ in scope["headers"]):
            read = await beginning(receive)
            key = conversation(b"".join(message.get("body", b"") for message in read))
            if key is not None:
                scope = {**scope, "headers": [*scope["headers"], (HEADER, key.encode())]}

        async def again() -> Message:
            return read.pop(0) if read else await receive()

        told = Telling(send)
        await self.app(scope, again, told)
        await told.close()


class Telling:
    """Passes on what a replica says; what is said in its place is said in other words."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.begun = self.ended = self.streams = False
        self.instead: int | None = None  # the router's status, in the place of a replica's
        self.said = b""  # by the router

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            headers = list(message.get("headers", ()))
            if message["status"] >= 400 and all(name != REPLICA for name, _ in headers):
                self.instead = message["status"]
                return
            self.streams = any(
                name.lower() == b"content-type" and value.startswith(EVENTS)
                for name, value in headers
            )
            message["headers"] = with_one_id(headers)
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
            self.said += b"" if self.instead is None else message.get("body", b"")
        if self.instead is None:
            await self.send(message)

    async def close(self) -> None:
        """Say what is still to be said: why there is no answer, or that one was broken off.

        The router leaves a request whose replica died as it is.
        """
        if self.instead is not None:
            await answer_with(refusal_of(self.instead, self.said), self.send)
        elif not self.begun:
            await answer_with(refusal_of(LOST), self.send)
        elif self.streams and not self.ended:
            last = event(refusal_of(LOST).to_dict()) + DONE
            await self.send(
                {"type": "http.response.body", "body": last.encode(), "more_body": False}
            )


def refusal_of(status: int, said: bytes = b"") -> Refusal:
    """What an error of the router means to a client, by its status and what it says with it."""
    if status == NO_SUCH_APPLICATION:
        return stopping()
    if status == UNAVAILABLE and FULL in said:
        return Refusal(
            "all replicas are busy.",
            "as many requests wait as may.",
            "ask again.",
            status=429,
            kind="rate_limit_error",
            code="queue_full",
            retry_after=1,
        )
    if status == UNAVAILABLE:
        return Refusal(
            "no replica can answer.",
            "they could not be started, or are being replaced.",
            "ask again later; if it stays, tell whoever runs the server.",
            status=503,
            kind="server_error",
            code="unavailable",
            retry_after=10,
        )
    return Refusal(
        "the replica that was answering is gone.",
        "others go on, and a new one is started.",
        "ask again.",
        status=503,
        kind="server_error",
        code="replica_lost",
        retry_after=1,
    )


async def beginning(receive: Receive) -> list[Message]:
    """The messages of a body, to its end or as far as is read."""
    read: list[Message] = []
    size = 0
    while size < LONGEST:
        message = await receive()
        read.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    return read


def conversation(body: bytes) -> str | None:
    """A name for what a request goes on with; None where it cannot be told.

    The messages of a chat up to the first of its user, which all its turns share, or the beginning
    of a prompt; and `user` where it is passed. A user alone, or a system message, would send all of
    a program's requests to one replica.
    """
    try:
        return name_of(json.loads(body))
    except (ValueError, RecursionError):  # refused by the replica that gets it, with a reason
        return None


def name_of(asked: Any) -> str | None:
    """A name for what a request goes on with, given its body."""
    if not isinstance(asked, dict):
        return None
    user = asked["user"] if isinstance(asked.get("user"), str) else ""
    if isinstance(asked.get("messages"), list):
        return named(["chat", user, opening(asked["messages"])])
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # several prompts: the first one's
    if not isinstance(prompt, str | list):
        return None
    return named(["text", user, prompt[:BEGINNING]])


def opening(messages: list[Any]) -> list[Any]:
    """The messages up to the first of the user."""
    for place, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[: place + 1]
    return messages


def named(parts: list[Any]) -> str:
    """A short name for values of JSON."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def with_one_id(headers: Any) -> list[tuple[bytes, bytes]]:
    """Headers with the first id of a request only: the server's own, where it gave one."""
    kept: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name.lower() != REQUEST_ID or all(known.lower() != REQUEST_ID for known, _ in kept):
            kept.append((name, value))
    return kept


def middlewares() -> list[Middleware]:
    """What the proxies of a Ray cluster put before all requests."""
    return [Middleware(Affinity)]
