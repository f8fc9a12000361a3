"""Prompts for as long as there is time: families in turn, dialogues turn by turn, round and round.

Nothing is written beforehand: a dialogue goes on with the answer that plain decoding gave when its
turn was measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from foretoken.bench.prompts import TimedPrompt, encode
from foretoken.bench.tasks import Task
from foretoken.errors import ConfigError


class PromptsInTurn:
    """An endless walk through tasks. Whoever takes a prompt answers it before taking the next."""

    def __init__(
        self, tasks: Sequence[Task], tokenizer: Any, max_new_tokens: int, max_length: int | None
    ) -> None:
        self.tasks, self.tokenizer = in_turn(tasks), tokenizer
        self.max_new_tokens, self.max_length = max_new_tokens, max_length
        self.passes = 0  # walks begun: from the second on, answers have been seen before
        self.skipped: dict[str, str] = {}  # prompts that nobody could write -> why
        self.answers: dict[str, list[int]] = {}
        self.walk = self._walk()

    def take(self) -> TimedPrompt:
        return next(self.walk)

    def answered(self, prompt: TimedPrompt, tokens: Sequence[int]) -> None:
        """What plain decoding wrote: a dialogue goes on with it."""
        self.answers[prompt.id] = list(tokens)

    def first(self) -> TimedPrompt:
        """The prompt the walk begins with, without taking it."""
        return next(PromptsInTurn(self.tasks, self.tokenizer, *self._limits())._walk())

    def _limits(self) -> tuple[int, int | None]:
        return self.max_new_tokens, self.max_length

    def _walk(self) -> Iterator[TimedPrompt]:
        while True:
            self.passes += 1
            fitting = 0
            for number, task in enumerate(self.tasks):
                for prompt in self._turns(task, number):
                    fitting += 1
                    yield prompt
            if not fitting:
                raise ConfigError(
                    f"tuning on {len(self.tasks)} prompts.",
                    f"none fits the context of {self.max_length} tokens with the "
                    f"{self.max_new_tokens} to write.",
                    "use shorter prompts or a smaller --max-new-tokens.",
                )

    def _turns(self, task: Task, number: int) -> Iterator[TimedPrompt]:
        """A dialogue's turns, each after the answers to those before it."""
        said: list[str] = []
        cap = task.max_new_tokens or self.max_new_tokens
        for turn in range(len(task.turns)):
            name = f"{number}: {task.id}" + (f", turn {turn + 1}" if turn else "")
            ids = encode(task, turn, said, self.tokenizer)
            if self.max_length is not None and len(ids) + cap > self.max_length:
                self.skipped[name] = "too long for the context"
                return
            yield TimedPrompt(id=name, family=task.family, ids=tuple(ids), max_new_tokens=cap)
            if turn + 1 < len(task.turns):
                if name not in self.answers:  # the time was over before anybody wrote one
                    return
                answer = self.answers[name]
                said.append(self.tokenizer.decode(answer, skip_special_tokens=True))


def in_turn(tasks: Sequence[Task]) -> list[Task]:
    """One task of each family, then the next one of each."""
    families: dict[str, list[Task]] = {}
    for task in tasks:
        families.setdefault(task.family, []).append(task)
    return [task for together in zip_longest(*families.values()) for task in together if task]


def digest(tasks: Sequence[Task]) -> str:
    """A checksum of what was asked, in whatever order."""
    texts = sorted(json.dumps([task.family, task.turns]) for task in tasks)
    return f"sha256:{hashlib.sha256(json.dumps(texts).encode()).hexdigest()}"
