"""Errors as OpenAI clients read them: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.errors import ForetokenError

INVALID = "invalid_request_error"
TIMEOUT = "timeout"  # the code of a request whose time was up
INTERNAL = "internal_error"  # and of one that failed by a fault of ours
LATE = 408  # its body did not come in time
GONE = 499  # the client left before it was answered: in logs and metrics only


class Refusal(ForetokenError):
    """A request that is not answered as it was asked, with the HTTP status that says so."""

    def __init__(
        self,
        asked: str,
        possible: str,
        do: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(asked, possible, do)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.code == TIMEOUT:  # OpenAI's client would send all of it again, twice
            found["x-should-retry"] = "false"
        if self.status == LATE:  # what the client still sends is not read
            found["connection"] = "close"
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        told = {"message": message(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}


def message(error: ForetokenError) -> str:
    """The three parts of an error as one line."""
    return f"{error.asked} Possible here: {error.possible} What to do: {error.do}"


def refusal_of(error: ForetokenError, param: str | None = None) -> Refusal:
    """What the session refuses is a mistake of the request, of one of its fields where that is
    known."""
    if isinstance(error, Refusal):
        return error
    return Refusal(error.asked, error.possible, error.do, param=param)


def too_large(error: ForetokenError) -> Refusal:
    """A text that memory can never hold, with the numbers."""
    return Refusal(
        error.asked, error.possible, error.do, param="max_tokens", code="memory_budget_exceeded"
    )


def invalid(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """A body that is no JSON, or whose fields have other types or values."""
    first = errors[0]
    places = [str(part) for part in first.get("loc", ())]
    where = ".".join(places)
    what = str(first.get("msg", "the body cannot be read"))
    return Refusal(
        f"{where or 'the request'}: {what}.",
        "fields have the types and ranges that /openapi.json describes.",
        f"correct {where or 'the JSON document'}"
        + (f", and {len(errors) - 1} more." if len(errors) > 1 else "."),
        param=places[0] if places else None,
        code="invalid_value" if where else "invalid_json",
    )


def internal(number: str) -> Refusal:
    """A fault of ours, by the id under which it was logged."""
    return Refusal(
        f"the request failed inside the server (error {number}).",
        "this is no mistake of the request; the log of the server says more.",
        "ask again; if it stays, tell whoever runs the server the id.",
        status=500,
        kind="server_error",
        code=INTERNAL,
    )


def late(limit: float) -> Refusal:
    """A client that does not send its request to the end."""
    return unfinished("body did not come to its end", f"{limit:g} s for more of a body")


def late_head(limit: float) -> Refusal:
    """A client that does not say to the end what it asks for."""
    return unfinished("headers did not come to their end", f"{limit:g} s for all of them")


def unfinished(what: str, waits: str) -> Refusal:
    """A request of which the rest did not come in time."""
    return Refusal(
        f"a request was begun whose {what}.",
        f"this server waits {waits}.",
        "send it again, in one go; if it stays, look at the connection.",
        status=LATE,
        code=TIMEOUT,
    )


def long_head(limit: int) -> Refusal:
    """Headers that are kept before anything else is known of a request."""
    return Refusal(
        "a request with headers that are too large was sent.",
        f"this server reads at most {limit} bytes of them, with the address.",
        "leave out headers, such as cookies; texts belong into the body.",
        status=431,
        code="headers_too_large",
    )


def stopping() -> Refusal:
    return Refusal(
        "the server is stopping.",
        "it takes no new requests, and ends those that run.",
        "ask again in some seconds, or another server.",
        status=503,
        kind="server_error",
        code="stopping",
        retry_after=5,
    )
