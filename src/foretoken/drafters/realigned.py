"""A draft model and its target, both as left-padded batches that are realigned (arXiv 2510.22876).

Both caches follow one rule (`lm.runtime.aligned`). EQSPEC decodes all rows in every round; EXSPEC
chooses rows that need no realigning, from a pool (`engine.grouping`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretoken.contract import LanguageModel, NoOptions
from foretoken.drafters.growers.priced_chain import PricedChain
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.errors import check_values
from foretoken.lm.runtime.alignment import told
from foretoken.lm.views.realigned import realigned


class RealignedPair(OrdinaryModel):
    """A draft model in an aligned cache; the target is scored through a `view` that has one too."""

    Config: Any = NoOptions

    def __init__(self, target: LanguageModel, draft: LanguageModel, config: Any = None) -> None:
        super().__init__(realigned(draft))
        self.view: Any = realigned(target)
        self.config = config or self.Config()


class PooledPair(RealignedPair):
    """The same for an engine that chooses rows of equal length."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        # Rows held, from which those of a round are chosen; None: three for each of `max_rows`,
        # as with the paper's 48 for batches of 16. Every one of them has its cache.
        window: int | None = None
        sort_prompts: bool = False  # short prompts enter the window first; long ones wait for them

        def __post_init__(self) -> None:
            check_values(self, ("window", self.window is None or self.window >= 1, "1 or more"))


class RealignedChain(PricedChain):
    """One guess per depth; tells what realigning took."""

    def __init__(self, model: RealignedPair, config: Any = None) -> None:
        super().__init__(model, config)
        self.pair = model

    def report(self) -> str:
        """How many rounds were realigned, and the seconds of target and draft."""
        lm: Any = self.pair.lm
        return told([self.pair.view.alignment, lm.alignment])
