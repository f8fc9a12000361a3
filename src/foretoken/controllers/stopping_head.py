"""What stopping rules share that ask a trained head about the draft model's last hidden layer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.controllers.steady import Stopping
from foretoken.errors import ConfigError, made_by
from foretoken.heads import made_for, store
from foretoken.types import Budget, FinalNorm, Level, Rows

LOG = logging.getLogger(__name__)


class StoppingHead(Stopping):
    """Base: the head of `config.head`, checked against the draft model and moved to its device."""

    kind: str  # its row in HEADS
    taps = (FinalNorm(),)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head, self.card = store.load(config.head, self.kind)
        self.folder = config.head
        self.fits = temperature_of(self.card)
        self.told = False  # that texts are written at another one

    def bind(self, drafter: Any) -> None:
        """Refuse a head that was trained for a draft of another shape, and warn of another draft's.

        Of a draft that is part of the target, or a head beside it, nothing is known.
        """
        model = drafter.model
        store.check_fits(self.card, self.folder, model.hidden_size, model.vocab_size)
        lm = getattr(model, "lm", None)
        if lm is not None:
            effect = "it judges the guesses of that one, and drafts end in the wrong places"
            made_for.warn_of_another(self.card, self.folder, lm, effect)

    def budgets(self, rows: Rows) -> list[Budget]:
        if not self.told and self.fits is not None:
            self.tell_temperature(rows, self.fits)
        return super().budgets(rows)

    def tell_temperature(self, rows: Rows, fits: float) -> None:
        """Warn once of a text at another temperature than the head learned from."""
        others = {one.params.temperature for one in rows if not one.rehearsal} - {fits}
        if others:
            self.told = True
            LOG.warning(
                "the %s head in %s was trained at temperature %g, and a text is written at %g: "
                "drafts end in the wrong places; `foretoken train` makes one for that temperature",
                self.card.kind, self.folder, fits, min(others),
            )  # fmt: skip

    def states(self, level: Level) -> Tensor:
        """Hidden states [n H] of a level's branches; the head goes to where they are."""
        assert level.hidden is not None, "a grower hands over what the rule taps"
        if next(self.head.parameters()).device != level.hidden.device:
            self.head.to(level.hidden.device)
        return level.hidden[:, 0]


def temperature_of(card: store.Card) -> float | None:
    """That of the texts a head learned from; None where its notes do not say, or the texts were
    written by others.
    """
    settings = card.notes.get("settings") if isinstance(card.notes, Mapping) else None
    if not isinstance(settings, Mapping) or settings.get("states") == "asked":
        return None
    found = settings.get("temperature")
    return float(found) if isinstance(found, int | float) else None


def require_head(folder: str | Path, kind: str, asked: str) -> None:
    """ConfigError where no folder is named."""
    if folder == "":
        raise ConfigError(
            f"{asked} were asked for without a head.",
            "the head is trained for one pair of models and kept in a folder.",
            made_by(f"foretoken train {kind} --out DIR", "head"),
        )
