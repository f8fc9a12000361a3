"""Which model a head was trained for: told in its notes, and compared where it is opened.

Heads fit every model of the same width and vocabulary, and guess well for one of them: not for the
instruct version of their base. Nothing fails by it, so that it is a warning.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foretoken.contract import LanguageModel
from foretoken.heads.store import Card

LOG = logging.getLogger(__name__)
ROWS = 64  # of the input embeddings, spread over the vocabulary
WHO, WHAT = "of", "identity"  # names of the notes
FEWER = "texts stay what they are, and fewer of its guesses stand"

_told: set[tuple[str, str, str]] = set()


def notes_of(lm: LanguageModel) -> dict[str, str]:
    """What a head's notes say of the model that it reads; a name only where the model has one."""
    config = getattr(getattr(innermost(lm), "model", None), "config", None)
    name = str(getattr(config, "name_or_path", None) or "")
    if name and Path(name).expanduser().is_dir():
        name = Path(name).expanduser().resolve().name  # where it lies is this machine's affair
    found = {WHO: name, WHAT: identity(lm)}
    return {key: value for key, value in found.items() if value}


def warn_of_another(card: Card, folder: str | Path, lm: LanguageModel, effect: str = FEWER) -> bool:
    """Whether a head was trained for another model than this one; told once for each such pair,
    with the `effect` that it has.

    Of heads whose notes do not say it, and of models that cannot be asked, nothing is known: False.
    """
    known = card.notes.get(WHAT) if isinstance(card.notes, Mapping) else None
    found = identity(lm) if known else ""
    if not found or found == known:
        return False
    pair = str(folder), card.weights, found
    if pair not in _told:
        _told.add(pair)
        LOG.warning(
            "the %s head in %s was trained for another model%s: %s; `foretoken train` makes one "
            "for this model",
            card.kind, folder, f", {name}" if (name := card.notes.get(WHO)) else "", effect,
        )  # fmt: skip
    return True


@torch.no_grad()
def identity(lm: LanguageModel) -> str:
    """A digest of some input embeddings in bfloat16, of whatever type they are now; empty where
    there are none to look at.

    Training moves them unless it leaves them out, as adapters do; no kernel packs them.
    """
    base = innermost(lm)
    ask = getattr(getattr(base, "model", None), "get_input_embeddings", None)
    if ask is None:
        rows = base.embed(spread(base.vocab_size))
    else:
        table = getattr(ask(), "weight", None)
        if not isinstance(table, torch.Tensor) or table.is_meta or not table.is_floating_point():
            return ""
        rows = table[torch.tensor(spread(len(table)), device=table.device)]
    kept = rows.detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(kept.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def spread(count: int) -> list[int]:
    """Tokens from the first to the last of a vocabulary."""
    return [(count - 1) * i // (ROWS - 1) for i in range(ROWS)]


def innermost(lm: Any) -> Any:
    """The model below all views of it."""
    return getattr(lm, "base", lm)
