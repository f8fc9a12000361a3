"""Errors a user can cause. Each says what was asked, what is possible here, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class ForetokenError(Exception):
    """Root of all errors raised for a user's mistake or a model's limit."""

    def __init__(self, asked: str, possible: str, do: str) -> None:
        self.asked, self.possible, self.do = asked, possible, do
        super().__init__(f"{asked}\n  possible here: {possible}\n  what to do: {do}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew from its parts: a pool of processes sends errors to who asked, pickled."""
        return type(self), (self.asked, self.possible, self.do), self.__dict__


class PairingError(ForetokenError):
    """A drafter's candidates were handed to a verifier whose rule is not exact for them."""


class CapabilityError(ForetokenError):
    """The model cannot do what the method needs."""


class WrongLogits(CapabilityError):
    """Logits from a cache are not those of a forward without one."""


class ConfigError(ForetokenError):
    """A value, a name, a prompt or a path that cannot be used."""


class ContextError(ConfigError):
    """A prompt is longer than the model's context."""


class CheckpointError(ForetokenError):
    """A model directory or a training checkpoint that is missing, unsafe or broken."""


class TokenizerError(CheckpointError):
    """A tokenizer whose files are missing or broken."""


def check_values(owner: object, *rules: tuple[str, bool, str]) -> None:
    """Raise ConfigError for the first attribute of `owner` that is not good.

    A rule is an attribute's name, whether its value is good, and what is allowed.
    """
    for name, good, allowed in rules:
        if not good:
            raise ConfigError(
                f"{name}={getattr(owner, name)!r} was asked for.",
                f"{name} is {allowed}.",
                f"pass a {name} that is {allowed}.",
            )


def made_by(command: str, option: str) -> str:
    """What to do where a folder is missing that a command makes."""
    return f"make one with `{command}`, then pass {option}=DIR (in a shell --set {option}=DIR)."


def meant(name: str, names: Iterable[str]) -> str:
    """What to do about an unknown name: which of the known ones is close, if any is."""
    close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else "choose one of these."
