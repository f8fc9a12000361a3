"""What stopping rules share that ask a trained head about the draft model's last hidden layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.controllers.steady import Stopping
from foretoken.errors import ConfigError, made_by
from foretoken.heads import store
from foretoken.types import FinalNorm, Level


class StoppingHead(Stopping):
    """Base: the head of `config.head`, checked against the draft model and moved to its device."""

    kind: str  # its row in HEADS
    taps = (FinalNorm(),)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head, self.card = store.load(config.head, self.kind)
        self.folder = config.head

    def bind(self, drafter: Any) -> None:
        """Refuse a head that was trained for another draft than this one."""
        model = drafter.model
        store.check_fits(self.card, self.folder, model.hidden_size, model.vocab_size)

    def states(self, level: Level) -> Tensor:
        """Hidden states [n H] of a level's branches; the head goes to where they are."""
        assert level.hidden is not None, "a grower hands over what the rule taps"
        if next(self.head.parameters()).device != level.hidden.device:
            self.head.to(level.hidden.device)
        return level.hidden[:, 0]


def require_head(folder: str | Path, kind: str, asked: str) -> None:
    """ConfigError where no folder is named."""
    if folder == "":
        raise ConfigError(
            f"{asked} were asked for without a head.",
            "the head is trained for one pair of models and kept in a folder.",
            made_by(f"foretoken train {kind} --out DIR", "head"),
        )
