"""A trained head beside the target: how methods are told of one, and how it gets there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from foretoken.contract import LanguageModel
from foretoken.errors import CapabilityError, ConfigError, made_by
from foretoken.heads import made_for, store
from foretoken.lm.draft_vocabulary import chosen_rows
from foretoken.lm.kernels.choosing import take_native
from foretoken.lm.views.few_unembedded import FewUnembedded
from foretoken.types import DecodeState, FinalNorm, Layer, Taps

PIECE = 512  # tokens of a prompt that are read at once: all of a long one take gigabytes


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """Options of every draft model that is a head."""

    draft_head: str | Path = ""  # folder that `foretoken train` wrote; there is no default


class TrainedHead:
    """Base of draft models that are a head of HEADS on the target's states behind its last norm."""

    taps: Taps = (FinalNorm(),)
    reads_late = True

    Config = HeadOptions

    def __init__(self, target: LanguageModel, kind: str, config: HeadOptions | None = None) -> None:
        folder = (config or self.Config()).draft_head
        if str(folder) == "":
            raise ConfigError(
                f"drafting with a head of the kind {kind!r} was asked for without one.",
                "a head is trained for one target and kept in a folder.",
                made_by(f"foretoken train {kind} --out DIR", "draft_head"),
            )
        self.card = card = store.read_card(folder, kind)
        store.check_fits(card, folder, target.hidden_size, target.vocab_size)
        made_for.warn_of_another(card, folder, target)
        self.like = target.embed([0])
        where = self.like.device, self.like.dtype
        self.head: Any = shared(str(folder), kind, card.weights, *where)
        self.vocab_size = target.vocab_size

    def close(self, row: DecodeState) -> None:
        row.private.pop(self, None)


@lru_cache(maxsize=4)
def shared(folder: str, kind: str, weights: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The head in a folder, in the target's type: one for all sessions, as nobody changes it.

    `weights` is the digest of its file: a head that was trained anew is another one.
    """
    head = store.load(folder, kind)[0].to(device, dtype)
    take_native(head)
    return head


def reading_few(target: LanguageModel, folder: str | Path) -> LanguageModel:
    """The target, at the rows of its output layer that a head's folder lists, if it lists any."""
    rows = chosen_rows(None, folder, target.vocab_size)
    return target if rows is None else FewUnembedded(target, rows)


def check_depth(taps: Taps, kind: str, target: LanguageModel) -> None:
    """CapabilityError for a head that reads layers which the target has not."""
    deepest = max((tap.index for tap in taps if isinstance(tap, Layer)), default=-1)
    if deepest >= target.layers:
        raise CapabilityError(
            f"a head of the kind {kind!r} was asked for with a target of {target.layers} layers.",
            f"it reads the output of layer {deepest}, counted from 0.",
            f"use the target it was trained for, or train one: `foretoken train {kind}`.",
        )
