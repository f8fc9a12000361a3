"""Server-sent events, and what OpenAI's two endpoints say in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DONE = "[DONE]"
TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")  # of a chat's delta or message


class Malformed(ValueError):
    """A stream or an answer that does not follow the protocol."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one event or one whole answer says."""

    text: bool  # whether output came with it
    finish: str | None
    usage: Mapping[str, Any] | None
    error: str | None


class Events:
    """The data of the events of a stream, as its bytes come.

    Lines are cut at newline bytes only: text inside JSON may hold other characters that Python
    takes for ends of lines.
    """

    __slots__ = ("_data", "_rest", "seen")

    def __init__(self) -> None:
        self._rest, self.seen = b"", 0
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The events that are whole after this piece of the stream."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found = [data for line in lines if (data := self._take(line.rstrip(b"\r"))) is not None]
        self.seen += len(found)
        return found

    def end(self) -> list[str]:
        """An event that the stream left without its empty line."""
        return self.feed(b"\n\n")

    def _take(self, line: bytes) -> str | None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            data = b"\n".join(self._data)
            self._data.clear()
            return decoded(data)
        return None


def decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as problem:
        raise Malformed(f"an event is no UTF-8 text: {problem}") from problem


def read(said: str | bytes) -> Chunk:
    """One event, or the body of an answer that is not streamed."""
    try:
        found = json.loads(said)
    except ValueError as problem:
        raise Malformed(f"no JSON: {clipped(said)}") from problem
    if not isinstance(found, dict):
        raise Malformed(f"no JSON object: {clipped(said)}")
    if error := found.get("error"):
        message = error.get("message", error) if isinstance(error, dict) else error
        return Chunk(False, None, None, str(message))
    choices, usage = found.get("choices"), found.get("usage")
    if not isinstance(choices, list) or not isinstance(usage, dict | None):
        raise Malformed(f"no choices: {clipped(said)}")
    text, finish = False, None
    for choice in choices:
        if not isinstance(choice, dict):
            raise Malformed(f"no choice: {clipped(said)}")
        body = choice.get("delta") or choice.get("message") or {}
        if not isinstance(body, dict):
            raise Malformed(f"no text in a choice: {clipped(said)}")
        text = text or bool(choice.get("text")) or any(body.get(name) for name in TEXTS)
        finish = choice.get("finish_reason") or finish
    return Chunk(text, finish, usage, None)


def clipped(said: str | bytes, most: int = 200) -> str:
    """The beginning of what a server said, in one line."""
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "\u2026"
