"""A trained head beside the target: how methods are told of one, and how it gets there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.contract import LanguageModel
from foretoken.errors import ConfigError
from foretoken.heads import store
from foretoken.types import DecodeState, FinalNorm, Taps


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """Options of every draft model that is a head."""

    draft_head: str | Path = ""  # folder that `foretoken train` wrote; there is no default


class TrainedHead:
    """Base of draft models that are a head of HEADS on the target's states behind its last norm."""

    taps: Taps = (FinalNorm(),)

    Config = HeadOptions

    def __init__(self, target: LanguageModel, kind: str, config: HeadOptions | None = None) -> None:
        folder = (config or self.Config()).draft_head
        if str(folder) == "":
            raise ConfigError(
                f"drafting with a head of the kind {kind!r} was asked for without one.",
                "a head is trained for one target and kept in a folder.",
                f"make one with `foretoken train {kind} --out DIR`, then pass draft_head=DIR.",
            )
        head, card = store.load(folder, kind)
        store.check_fits(card, folder, target.hidden_size, target.vocab_size)
        self.head: Any = head.to(target.embed([0]).device)
        self.card = card
        self.vocab_size = target.vocab_size

    def close(self, row: DecodeState) -> None:
        row.private.pop(self, None)
