"""How a draft learns while it serves."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.errors import check_values
from foretoken.training.config import check_types


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineSettings:
    """When a draft learns from live traffic, from how much of it, and how fast."""

    interval: int = 8  # requests of a topic between two times it learns
    updates: int = 1  # optimizer steps each time
    texts: int = 8  # parts of texts in a step: what is new, then older ones at random
    rate: float = 1e-4  # of AdamW; larger ones cost acceptance for a while before they bring some
    warmup: int = 0  # optimizer steps until the rate is whole: first ones move all weights alike
    share: float = 0.03  # of decoding time that learning may take; 1: all that is due, at once
    passes: float = 8.0  # times that what was heard is learned in moments without work (`rest`)
    begin: int = 1  # parts of texts of a topic heard before any is learned: a few mislead
    trial: int = 0  # new parts that learned weights must do better on before they serve; 0: none
    accepted: float = 0.1  # share of the accepted places learned beside the rejected: less drift
    tables: bool = True  # whether embedding and output layer learn, too: most of a draft's weights
    laws: int = 16  # likeliest tokens kept of every law
    window: int = 192  # tokens of a part of a text
    slice_tokens: int = 512  # tokens learned at a stretch, between two steps of decoding
    buffer: int = 512  # parts of texts that are kept, of each topic
    buffer_mib: float = 16.0  # MiB of them, at most
    topics: int = 1  # drafts, one for each topic of prompts
    seed: int = 0  # of what is drawn from the buffer

    def __post_init__(self) -> None:
        check_types(self)
        counts = (
            "interval", "updates", "texts", "laws", "slice_tokens", "buffer", "topics", "begin",
        )  # fmt: skip
        check_values(
            self,
            *((name, getattr(self, name) >= 1, "1 or more") for name in counts),
            ("window", self.window >= 2, "2 or more"),
            ("rate", self.rate > 0, "above 0"),
            ("buffer_mib", self.buffer_mib > 0, "above 0"),
            ("warmup", self.warmup >= 0, "0 or more steps"),
            ("passes", self.passes >= 0, "0 (never) or more"),
            ("share", 0 < self.share <= 1, "above 0, at most 1"),
            ("accepted", 0 <= self.accepted <= 1, "from 0 to 1"),
            ("trial", self.trial >= 0, "0 (none) or more"),
            ("trial", not self.trial or self.accepted > 0, "0 where no accepted place is kept"),
        )
