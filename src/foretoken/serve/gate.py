"""What stands before every request: its id, its key, the size of its body; and its line at the end.

Plain ASGI, as each message of a stream passes here.
"""

from __future__ import annotations

import hmac
import json
import logging
from time import perf_counter
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.answer import Account
from foretoken.serve.service import Service
from foretoken.serve.wire.errors import GONE, INTERNAL, LATE, TIMEOUT, Refusal

REQUESTS = logging.getLogger("foretoken.serve.requests")  # one record per request, as a dict
GUARDED = "/v1"  # paths that need a key
KNOWN = frozenset(
    ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/")
)


class Gate:
    """Lets requests in, counts them, and tells of them."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        self.keys = [key.encode() for key in service.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        account = Account(self.service.next_id(), perf_counter(), path_of(scope))
        scope["foretoken"] = account

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                account.status = message["status"]
                named = (b"x-request-id", account.id.encode())
                message["headers"] = [*message.get("headers", ()), named]
            await send(message)

        try:
            refusal = self.refused(scope, account)
            if refusal is not None:
                account.facts["error"] = refusal.code or refusal.kind
                await answer_with(refusal, noting)
                return
            counted = Counted(receive, self.service.settings.max_body)
            await self.app(scope, counted, noting)
        except Exception:  # answered outside of here
            account.status = account.status or 500
            account.facts.setdefault("error", INTERNAL)
            raise
        finally:
            self.note(account)

    def refused(self, scope: Scope, account: Account) -> Refusal | None:
        """Why a request is not even read: a wrong key, or a body that says it is too large."""
        headers = dict(scope["headers"])
        if self.keys and account.path.startswith(GUARDED):
            number = self.key_of(headers.get(b"authorization", b""))
            if number is None:
                return wrong_key()
            account.owner = f"key {number}"
        length = headers.get(b"content-length", b"")
        limit = self.service.settings.max_body
        if length.isdigit() and int(length) > limit:
            return too_large(limit)
        return None

    def key_of(self, header: bytes) -> int | None:
        """Which key was sent, compared in a time that says nothing of how much of it is right."""
        kind, _, sent = header.partition(b" ")
        found = None
        for number, key in enumerate(self.keys):
            if hmac.compare_digest(sent.strip(), key) and kind.lower() == b"bearer":
                found = number
        return found

    def note(self, account: Account) -> None:
        """Count a request that is over, and tell of it."""
        account.status = account.status or GONE
        path = account.path if account.path in KNOWN else "other"
        metrics, facts = self.service.metrics, account.facts
        metrics.requests.labels(path, str(account.status)).inc()
        waited = perf_counter() - account.began
        if facts.get("error") is not None:
            metrics.errors.labels(path, facts["error"]).inc()
        if facts.get("ttft") is not None:
            metrics.ttft.observe(facts["ttft"])
        elif facts.get("error") == TIMEOUT and account.status != LATE:
            metrics.ttft.observe(waited)  # or the slowest would be missing
        if facts.get("tpot") is not None:
            metrics.tpot.observe(facts["tpot"])
        if not account.path.startswith(GUARDED):
            return
        line: dict[str, Any] = {
            "id": account.id,
            "path": account.path[:200],
            "status": account.status,
            "seconds": round(waited, 6),
            "requester": account.requester,
            **facts,
        }
        told = account.id, line["path"], account.status
        REQUESTS.info("request %s: %s %d", *told, extra={"request": line})


def path_of(scope: Scope) -> str:
    """The path that routes are found by: without that of a proxy, or of an app around this one."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


class Counted:
    """The body of a request, refused once it is larger than it may be."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self.receive, self.limit = receive, limit
        self.left = limit

    async def __call__(self) -> Message:
        message = await self.receive()
        if message["type"] == "http.request":
            self.left -= len(message.get("body", b""))
            if self.left < 0:
                raise too_large(self.limit)
        return message


async def answer_with(refusal: Refusal, send: Send) -> None:
    """An error as a whole response."""
    document = json.dumps(refusal.to_dict()).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(document)),
        "connection": "close",  # what the client goes on sending is not read
        **refusal.headers,
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": document})


def wrong_key() -> Refusal:
    return Refusal(
        "a request without a valid key was sent.",
        "this server answers who sends one of its keys.",
        "send the header Authorization: Bearer KEY.",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
    )


def too_large(limit: int) -> Refusal:
    return Refusal(
        "a body that is too large was sent.",
        f"this server reads at most {limit} bytes.",
        "shorten the prompt, or send fewer at once.",
        status=413,
        code="body_too_large",
    )
