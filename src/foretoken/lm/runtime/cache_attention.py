"""Attention of one forward over the slot cache, for a captured model that asks layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.lm.runtime.attention import attend
from foretoken.lm.runtime.cache import SlotCache
from foretoken.lm.runtime.masks import Sights
from foretoken.lm.runtime.slot_attention import SlotAttention


class CacheAttention:
    """Writes new keys and values where the cache was aimed, and reads all that queries see."""

    __slots__ = ("columns", "sights", "update", "windows")

    def __init__(self, cache: SlotCache, sights: Sights, windows: Sequence[int | None]) -> None:
        self.sights, self.windows = sights, windows
        self.columns = cache.lone_columns()
        self.update = cache.update

    def __call__(
        self,
        layer: int,
        query: Tensor,  # [B, H, Q, D]
        key: Tensor,  # [B, KV, Q, D]
        value: Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[B, Q, H, D of values]."""
        if self.columns is None:
            keys, values = self.update(key, value, layer)
        else:
            into_keys, into_values, keys, values = self.columns[layer]
            into_keys.copy_(key)
            into_values.copy_(value)
        sights = self.sights
        window = self.windows[layer]
        mixed, _ = attend(
            None, query, keys, values, sights.masks[window], scaling, 0.0, softcap, sinks,
            sights.unmasked, sights.causal, sights.prefix_of(window),
        )  # fmt: skip
        return mixed


class RowsTogether:
    """Attention of rows of equal width, laid end to end, as one batch over padded columns."""

    __slots__ = ("attend", "rows")

    def __init__(self, attend: CacheAttention, rows: int) -> None:
        self.attend, self.rows = attend, rows

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *how: Any
    ) -> Tensor:  # [1, H, B Q, D] -> [1, B Q, H, D of values]
        batch = [
            states[0].reshape(states.shape[1], self.rows, -1, states.shape[3]).transpose(0, 1)
            for states in (query, key, value)
        ]
        return self.attend(layer, batch[0], batch[1], batch[2], *how).flatten(0, 1)[None]


class RowsApart:
    """Attention of several rows laid end to end, each over its own columns and no more."""

    __slots__ = ("rows",)

    def __init__(self, rows: Sequence[tuple[CacheAttention, int, int]]) -> None:
        self.rows = rows  # with the first place of each, and the one behind its last

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *how: Any
    ) -> Tensor:  # [1, H, all Q, D] -> [1, all Q, H, D of values]
        mixed = [
            attend(layer, query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], *how)
            for attend, a, b in self.rows
        ]
        return torch.cat(mixed, 1)


Attention = CacheAttention | RowsTogether | RowsApart | SlotAttention
