"""One task with a checkable answer, and the plain-text frame that every prompt wears."""

from __future__ import annotations

import re
from dataclasses import dataclass

ANSWER_MARK = "### Answer:\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A prompt, one good answer, and what any good answer must and must not contain."""

    prompt: str  # ends with ANSWER_MARK; a base model continues it
    answer: str  # one correct answer; many wordings are
    family: str
    facts: tuple[str, ...]  # every one must appear, as whole words
    wrong: tuple[
        str, ...
    ] = ()  # distractors: none may appear, so that naming everything is no answer
    turns: tuple[str, ...] = ()  # what the user said, oldest first

    def check(self, text: str) -> bool:
        """Whether `text` states every fact and none of the distractors."""
        return all(_has(text, fact) for fact in self.facts) and not any(
            _has(text, w) for w in self.wrong
        )


def _has(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def frame(family: str, body: str) -> str:
    """The prompt format: a task line, the body, the answer mark."""
    return f"### Task: {family}\n{body}\n{ANSWER_MARK}"
