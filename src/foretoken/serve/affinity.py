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

HEADER = b"x-session-id"  # the router sends equal ones to the same replica
REPLICA = b"x-foretoken-replica"  # who answered; without it the router itself did
REQUEST_ID = b"x-request-id"
NO_SUCH_APPLICATION, LOST, TOO_MANY = 404, 500, 503  # statuses of the router
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
        if not told.begun:  # so the router leaves a request whose replica died
            await answer_with(refusal_of(LOST), send)


class Telling:
    """Passes on what a replica says; what is said in its place is said in other words."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.begun = self.replaced = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            headers = list(message.get("headers", ()))
            if message["status"] >= 400 and all(name != REPLICA for name, _ in headers):
                self.replaced = True
                await answer_with(refusal_of(message["status"]), self.send)
                return
            message["headers"] = with_one_id(headers)
        if not self.replaced:
            await self.send(message)


def refusal_of(status: int) -> Refusal:
    """What an error of the router means to a client."""
    if status == NO_SUCH_APPLICATION:
        return stopping()
    full = status == TOO_MANY
    return Refusal(
        "all replicas are busy." if full else "the replica that was answering is gone.",
        "as many requests wait as may." if full else "others go on, and a new one is started.",
        "ask again.",
        status=429 if full else 503,
        kind="rate_limit_error" if full else "server_error",
        code="queue_full" if full else "replica_lost",
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

    `user` where it is passed; else the messages of a chat up to the first of its user, which all
    its turns share, or the beginning of a prompt. A system message alone would send everybody to
    one replica.
    """
    try:
        asked = json.loads(body)
    except ValueError:  # refused by the replica that gets it, with a reason
        return None
    if not isinstance(asked, dict):
        return None
    if isinstance(asked.get("user"), str) and asked["user"]:
        return named(["user", asked["user"]])
    if isinstance(asked.get("messages"), list):
        return named(["chat", opening(asked["messages"])])
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # several prompts: the first one's
    if not isinstance(prompt, str | list):
        return None
    return named(["text", prompt[:BEGINNING]])


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
