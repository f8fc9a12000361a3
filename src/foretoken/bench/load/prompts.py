"""Prompts as the bodies of requests, the same for every server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from foretoken.bench.tasks import Task
from foretoken.errors import ConfigError, check_values

ENDPOINTS = {"chat": "chat/completions", "completions": "completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """What every request asks for, whatever its prompt."""

    endpoint: str = "chat"
    max_tokens: int = 64
    temperature: float = 0.0
    stream: bool = True
    ignore_eos: bool = False
    # Request n samples with seed + n; None: as most users ask. A server that has to repeat a text
    # may draft for it by less than it knows.
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(
                f"the endpoint {self.endpoint} was asked for.",
                f"endpoints are {', '.join(ENDPOINTS)}.",
                "pass --endpoint chat or --endpoint completions.",
            )
        warm = 0.0 <= self.temperature < math.inf
        check_values(
            self,
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", warm, "0 or more"),
        )

    @property
    def path(self) -> str:
        return ENDPOINTS[self.endpoint]

    def body(self, task: Task, number: int, model: str, usage: bool) -> dict[str, Any]:
        """The body of one request: the first turn of its task, answered once."""
        found: dict[str, Any] = {
            "model": model,
            "max_tokens": task.max_new_tokens or self.max_tokens,
            "temperature": self.temperature,
            "stream": self.stream,
        }
        if self.seed is not None:
            found["seed"] = self.seed + number
        if self.endpoint == "chat":
            found["messages"] = [{"role": "user", "content": task.turns[0]}]
        else:
            turn = task.turns[0]
            found["prompt"] = turn if isinstance(turn, str) else list(turn)
        if self.ignore_eos:
            found["ignore_eos"] = True
        if self.stream and usage:
            found["stream_options"] = {"include_usage": True}
        return found


@dataclass(slots=True)
class Prompts:
    """Tasks in an order drawn once; each request takes the next, and at the end the first again."""

    tasks: Sequence[Task]
    seed: int = 0
    asked: int = 0  # requests that took a prompt from one place, the most of all places
    spared: int = 0  # and from the other end
    _order: list[Task] = field(init=False)

    def __post_init__(self) -> None:
        self._order = list(self.tasks)
        Random(self.seed).shuffle(self._order)

    def at(self, number: int) -> Task:
        self.asked = max(self.asked, number + 1)
        return self._order[number % len(self._order)]

    def spare(self, number: int) -> Task:
        """A prompt from the other end, for requests that are not measured."""
        self.spared = max(self.spared, number + 1)
        return self._order[-1 - number % len(self._order)]

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(task.family for task in self.tasks))

    @property
    def repeated(self) -> bool:
        """Whether a server saw a prompt twice, so that it may have kept what it computed."""
        return self.asked + self.spared > len(self._order)


def check_prompts(tasks: Sequence[Task], writing: Writing) -> None:
    """Refuse prompts that the endpoint cannot be asked."""
    if not tasks:
        raise ConfigError(
            "a load test without prompts.",
            "every request needs one.",
            "pass --prompts FILE with at least one line, or none for the built-in families.",
        )
    for task in tasks:
        if writing.endpoint == "chat" and not isinstance(task.turns[0], str):
            raise ConfigError(
                f"the prompt {task.id} is a list of token ids.",
                "a chat takes text; only completions take token ids.",
                "pass --endpoint completions.",
            )
