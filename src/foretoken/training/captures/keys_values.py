"""Texts with the keys and values of the target's last layer, for heads that read its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.engine.session import Session
from foretoken.lm.views.view import innermost
from foretoken.row import make_row
from foretoken.training.capture import Capture, Tensors
from foretoken.types import DecodeState

SINKS = 4  # first tokens of a text, which every later one attends to


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysValues(Capture):
    """Tokens and positions [1 T], "keys" and "values" [1 T heads size] as they lie in the cache,
    weights [1 T]: 1 where the target wrote.

    A longer text keeps its first tokens, its last ones and their true positions; the first of the
    last ones counts for nothing, as the token before it is not there.
    """

    window: int  # T

    def record(self, session: Session, row: DecodeState, text: Sequence[int]) -> Tensors:
        target, before = innermost(session.target), len(row.tokens)
        whole = make_row([*row.tokens, *text], row.params, row.coins, target.vocab_size)
        target.prefill([whole])
        kept = target.layer_cache(target.layers - 1).keys_values(whole)
        keys, values = (F.pad(part.transpose(0, 1).cpu(), (0, 0, 0, 0, 0, 1)) for part in kept)
        target.free([whole])
        places = torch.arange(len(whole.tokens))
        found = {
            "input_ids": torch.tensor(whole.tokens),
            "positions": places,
            "keys": keys,  # nobody reads the last token's, which were not cached
            "values": values,
            "weights": (places >= before).float(),
        }
        if len(places) > self.window:
            # It would be learned as what follows the last token before the gap.
            found["weights"][len(places) - self.window + SINKS] = 0.0
        return {name: self.cut(value) for name, value in found.items()}

    def cut(self, values: Tensor) -> Tensor:
        """The first and the last rows, T in all, as the first entry of a batch; zeros behind."""
        missing = self.window - len(values)
        if missing < 0:
            values = torch.cat([values[:SINKS], values[SINKS - self.window :]])
        return F.pad(values, (0, 0) * (values.dim() - 1) + (0, max(0, missing)))[None]
