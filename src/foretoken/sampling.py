"""The sampling options of a row, the values they may have, and why its text ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one row; the same warps are applied to p and to q."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and text, as in transformers
    presence_penalty: float = 0.0  # over generated text only, as in the OpenAI interface
    frequency_penalty: float = 0.0  # over generated text only
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_tokens: frozenset[int] = frozenset()
    min_new_tokens: int = 0  # end tokens are impossible before, and stop texts end nothing
    stop: tuple[str, ...] = ()
    eos: frozenset[int] = frozenset()
    processors: Any = None  # a transformers LogitsProcessorList, applied after the options above
    grammar: Any = None  # what the text has to match, applied last (`engine.guided.Grammar`)
    seed: int | None = None

    def __post_init__(self) -> None:
        checks: list[tuple[bool, str, str]] = [
            (self.max_new_tokens >= 1, "max_new_tokens", "1 or more"),
            (0.0 <= self.temperature < math.inf, "temperature", "0 (greedy) or more, and finite"),
            (self.top_k >= 0, "top_k", "0 (off) or more"),
            (0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]; 1 is off"),
            (0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]; 0 is off"),
            (0.0 < self.repetition_penalty < math.inf, "repetition_penalty", "above 0; 1 is off"),
            (math.isfinite(self.presence_penalty), "presence_penalty", "a finite number"),
            (math.isfinite(self.frequency_penalty), "frequency_penalty", "a finite number"),
            (self.min_new_tokens >= 0, "min_new_tokens", "0 or more"),
        ]
        for good, name, allowed in checks:
            if not good:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} was asked for.",
                    f"{name} must be {allowed}.",
                    f"pass a {name} that is {allowed}.",
                )


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a row ended."""

    # "stop" (end token, stop text, stopping criterion), "length" (max_new_tokens), "context" (the
    # model has no position left), "cancelled" or "error"
    reason: str
    stop_text: str | None = None  # the stop text that matched
