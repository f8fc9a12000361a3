"""Whole texts with the target's hidden states, and its laws where asked, for heads that guess.

One row of a shard is one text: the end of its prompt, then what the target wrote after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.engine.session import Session
from foretoken.lm.views.view import innermost
from foretoken.training.capture import Capture, Tensors
from foretoken.training.dataset.records import Laws
from foretoken.trees.build import chain
from foretoken.types import DecodeState, Draft, Draw, FinalNorm, Layer, Scores, Taps


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts(Capture):
    """Tokens [1 T], states [1 T H] behind the last norm, weights [1 T]: 1 where it wrote."""

    window: int  # T: longer texts lose their beginning, shorter ones are padded

    def read(self, target: Any) -> Taps:
        """The hidden states that are kept of a token, side by side."""
        return (FinalNorm(),)

    def record(self, session: Session, row: DecodeState, text: Sequence[int]) -> Tensors:
        target = innermost(session.target)
        taps = self.read(target)
        [prompt] = target.prefill([row], taps)
        draft = Draft(chain(row.tokens[-1], text), Draw.POINT)
        [score] = target.score([row], [draft], taps)
        target.free([row])
        assert prompt is not None and score.hidden is not None, "both were asked for"
        ids = torch.tensor([*row.tokens, *text])
        written = torch.arange(len(ids)) >= len(row.tokens)
        states = torch.cat([prompt, score.hidden]).flatten(1)
        return {
            "input_ids": self.cut(ids),
            "hidden": self.cut(self.kept(states)),
            "weights": self.cut(written.float()),
            **{name: self.cut(value) for name, value in self.said(score, len(row.tokens)).items()},
        }

    def kept(self, states: Tensor) -> Tensor:
        return states.float().cpu()

    def said(self, score: Scores, prompt: int) -> Tensors:
        """What else is kept of the scores of a text's tokens, behind a prompt of so many."""
        return {}

    def cut(self, values: Tensor) -> Tensor:
        """The last T rows as the first entry of a batch, zeros behind them."""
        values = values[-self.window :]
        missing = self.window - len(values)
        return F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing))[None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayeredTexts(Texts):
    """With the outputs [1 T L*H] of several layers, and the likeliest tokens "laws" and "log_probs"
    [1 T k] of the law that each token was drawn from.
    """

    taps: tuple[int, ...] | None  # layers; none: a low, a middle and a high one
    likeliest: int  # k

    def read(self, target: Any) -> Taps:
        return tuple(map(Layer, self.taps or fused_layers(target.layers)))

    def kept(self, states: Tensor) -> Tensor:
        return states.cpu()  # several of them: as the target has them

    def said(self, score: Scores, prompt: int) -> Tensors:
        laws = Laws.likeliest(score.logits[:-1], self.likeliest)
        return {
            "laws": F.pad(laws.tokens, (0, 0, prompt, 0)),
            "log_probs": F.pad(laws.log_probs, (0, 0, prompt, 0)),
        }


def fused_layers(layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads of a target, by the number of those it has."""
    return tuple(sorted({min(1, layers - 1), (layers - 1) // 2, max(0, layers - 4)}))
