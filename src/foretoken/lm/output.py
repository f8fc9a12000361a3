"""What `model.generate` leaves behind: its output object, and a filled key-value cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foretoken.lm.runtime.sharing import exclusive
from foretoken.types import DecodeState

if TYPE_CHECKING:
    from foretoken.lm.runtime.cached import CachedLM


def decoder_only_output(sequences: Tensor, cache: Cache | None = None) -> Any:
    """Sequences and cache; scores and hidden states are refused before a token is written."""
    return GenerateDecoderOnlyOutput(
        sequences=cast(torch.LongTensor, sequences), past_key_values=cache
    )


def fill_cache(lm: CachedLM, row: DecodeState, cache: Cache) -> None:
    """Keys and values of all the row's tokens but the last, as `generate` leaves them."""
    states = _states(lm, row)
    with torch.inference_mode(False), torch.no_grad():  # what the cache makes may be changed later
        for layer, (keys, values) in states.items():
            cache.update(keys, values, layer)


@exclusive
def _states(lm: CachedLM, row: DecodeState) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer, copies [1, heads, tokens, dim] that outlive the row and may be changed in place."""
    memory, switch, stop = lm._rows[row.uid], lm.family.switch, len(row.tokens) - 1
    if switch is not None and memory.far != (stop > switch):
        memory.cached = 0  # a draft that reached beyond the switch had all keys scaled anew
    lm._fill([row])
    at = slice(memory.slot, memory.slot + 1)
    with torch.inference_mode(False):
        return {
            index: (layer.keys[at, :, :stop].clone(), layer.values[at, :, :stop].clone())
            for index, layer in enumerate(lm.cache.rows_of)
            if layer.keys is not None and layer.values is not None
        }
