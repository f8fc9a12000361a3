"""Whole texts with the target's hidden states behind its last norm, for heads that guess.

One row of a shard is one text: the end of its prompt, then what the target wrote after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.engine.session import Session
from foretoken.lm.views.view import innermost
from foretoken.training.capture import Capture, Tensors
from foretoken.trees.build import chain
from foretoken.types import DecodeState, Draft, Draw, FinalNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts(Capture):
    """Tokens [1 T], states [1 T H] at them, and weights [1 T]: 1 where the target wrote."""

    window: int  # T: longer texts lose their beginning, shorter ones are padded

    def record(self, session: Session, row: DecodeState, text: Sequence[int]) -> Tensors:
        target = innermost(session.target)
        [prompt] = target.prefill([row], (FinalNorm(),))
        draft = Draft(chain(row.tokens[-1], text), Draw.POINT)
        [score] = target.score([row], [draft], (FinalNorm(),))
        target.free([row])
        assert prompt is not None and score.hidden is not None, "both were asked for"
        ids = torch.tensor([*row.tokens, *text])
        written = torch.arange(len(ids)) >= len(row.tokens)
        states = torch.cat([prompt, score.hidden])[:, 0]
        return {
            "input_ids": self.cut(ids),
            "hidden": self.cut(states.float().cpu()),
            "weights": self.cut(written.float()),
        }

    def cut(self, values: Tensor) -> Tensor:
        """The last T rows as the first entry of a batch, zeros behind them."""
        values = values[-self.window :]
        missing = self.window - len(values)
        return F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing))[None]
