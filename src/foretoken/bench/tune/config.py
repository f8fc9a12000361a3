"""What `foretoken tune` is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import check_values
from foretoken.types import SamplingParams

CUTS = ("top_k", "top_p", "min_p", "repetition_penalty")  # a text follows them; neutral by default


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """For whom, with what, and for how long."""

    target: str | Path  # directory or hub name
    drafts: tuple[str, ...] = ()
    datastores: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    minutes: float = 15.0
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    out: Path = Path("tuned")
    device: str | None = None
    dtype: str | None = None
    quiet: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        above = self.minutes > 0 and math.isfinite(self.minutes)
        check_values(self, ("minutes", above, "a number above 0"))
        self.params(self.max_new_tokens, frozenset())  # raises for what cannot be

    def params(self, cap: int, eos: frozenset[int]) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=cap,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            eos=eos,
        )

    def writing(self) -> dict[str, Any]:
        """What every candidate is asked to write, without options that change nothing."""
        names = ("max_new_tokens", "temperature", "seed")
        neutral = SamplingParams()
        cuts = [name for name in CUTS if getattr(self, name) != getattr(neutral, name)]
        return {name: getattr(self, name) for name in (*names, *cuts)}
