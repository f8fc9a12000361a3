"""Whole texts through a captured model at once, with no slot cache: for training, not for decoding.

A batch of texts is read in one forward, or a batch of rows is written in lockstep, a token each per
forward. Either way the captured forward runs with an attention of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.errors import CapabilityError
from foretoken.lm.runtime.attention import attend
from foretoken.lm.runtime.captured import HEADLESS
from foretoken.types import Taps


def captured_of(lm: Any, what: str) -> Any:
    """The captured forward of a language model; CapabilityError where it has none."""
    lean = getattr(lm, "lean", None)
    if lean is None:
        raise CapabilityError(
            f"{what} was asked for.",
            "this target's forward was not captured, or it is a table.",
            "leave the option out: the target is then asked through its KV cache.",
        )
    return lean


@torch.inference_mode()
def read_whole(lm: Any, ids: Int[Tensor, "n T"], taps: Taps) -> list[Float[Tensor, "n T H"]]:
    """What `taps` read of texts that begin in the first column, then the states behind all layers.

    Shorter texts may be padded behind their ends: nobody sees what is there.
    """
    lean = captured_of(lm, "reading whole texts")
    length = ids.shape[1]
    place = torch.arange(length, device=ids.device).clamp(max=(lm.max_length or length) - 1)
    attention = CausalAttention(lm.family.windows, length)
    states: list[Tensor] = lean.run(
        ids, place.expand_as(ids), place[-1:], attention, taps, HEADLESS
    )
    return states


class CausalAttention:
    """Every token sees itself and those before it, as far back as its layer's window goes."""

    def __init__(self, windows: Sequence[int | None], length: int) -> None:
        self.windows, self.length = windows, length
        self.masks: dict[int, Tensor] = {}  # of windows shorter than the texts

    def __call__(
        self,
        layer: int,
        query: Tensor,  # [B, H, T, D]
        key: Tensor,  # [B, KV, T, D]
        value: Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[B, T, H, D of values]."""
        window, mask = self.windows[layer], None
        if window is not None and window < self.length:
            if window not in self.masks:
                place = torch.arange(self.length, device=query.device)
                hidden = unseen(place[:, None] - place, window)
                self.masks[window] = hiding(hidden, query.dtype)[None, None]
            mask = self.masks[window]
        mixed, _ = attend(
            None, query, key, value, mask, scaling, 0.0, softcap, sinks, causal=mask is None
        )
        return mixed


class LockstepAttention:
    """Keys and values of rows that all stand in the same column, and attention over them.

    A row's text begins in column `begins`; before it there is padding. While prompts are read,
    `reading` are the rows of the call: they end in one column and see their own prompts. Masks and
    `at` stay at their addresses, so that a forward of one token can be captured as a graph.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        begins: Int[Tensor, "n"],
        columns: int,
        dtype: torch.dtype,
    ) -> None:
        self.windows, self.begins, self.dtype = windows, begins, dtype
        self.place = torch.arange(columns, device=begins.device)
        self.at = self.place[:1].clone()  # the column written next
        self.masks = {window: self.seen(0, window) for window in set(windows)}
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, once it was asked
        self.reading: slice | None = None
        self.prompts: dict[int | None, Tensor] = {}  # masks of the prompts that are read, by window

    def read(self, rows: slice | None) -> None:
        """What the next forwards bring: prompts of these rows, or a token of every row."""
        self.reading, self.prompts = rows, {}

    def go_to(self, column: int) -> None:
        """Write into this column next; it and those of the texts before it are seen."""
        self.at.fill_(column)
        for window, mask in self.masks.items():
            mask.copy_(self.seen(column, window))

    def seen(self, column: int, window: int | None) -> Float[Tensor, "n 1 1 S"]:
        """What each row's token in this column sees."""
        hidden = unseen(column - self.place, window) | (self.place < self.begins[:, None])
        return hiding(hidden, self.dtype)[:, None, None]

    def __call__(
        self,
        layer: int,
        query: Tensor,  # [b, H, Q, D]
        key: Tensor,  # [b, KV, Q, D]
        value: Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[b, Q, H, D of values]."""
        window = self.windows[layer]
        if layer not in self.kept:  # columns that are never written hold zeros
            size = len(self.begins), key.shape[1], len(self.place)
            self.kept[layer] = (
                key.new_zeros(*size, key.shape[3]),
                value.new_zeros(*size, value.shape[3]),
            )
        keys, values = self.kept[layer]
        mask = self.masks[window]
        if self.reading is None:
            keys.index_copy_(2, self.at, key)
            values.index_copy_(2, self.at, value)
        else:
            length = key.shape[2]
            keys[self.reading, :, :length] = key
            values[self.reading, :, :length] = value
            if window not in self.prompts:
                self.prompts[window] = self.within_prompts(length, window)
            mask, keys, values = self.prompts[window], key, value
        mixed, _ = attend(None, query, keys, values, mask, scaling, 0.0, softcap, sinks)
        return mixed

    def within_prompts(self, length: int, window: int | None) -> Float[Tensor, "b 1 P P"]:
        """Every token sees its row's prompt up to itself; padding, which nobody reads, itself."""
        place = self.place[:length]
        behind = place[:, None] - place
        hidden = unseen(behind, window) | (place < self.begins[self.reading, None, None])
        return hiding(hidden & (behind != 0), self.dtype)[:, None]


def unseen(behind: Int[Tensor, "*n"], window: int | None) -> Tensor:
    """Whether a token does not see one that lies so far behind it: those to come, and those that
    a window of its layer, itself among them, leaves behind."""
    hidden = behind < 0
    return hidden if window is None else hidden | (behind >= window)


def hiding(where: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added to scores: nothing, or so little that nothing is left."""
    return torch.zeros_like(where, dtype=dtype).masked_fill_(where, torch.finfo(dtype).min)
