"""Whole texts with the target's hidden states, and its laws where asked, for heads that guess.

One row of a shard is one text: the end of its prompt, then what the target wrote after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from foretoken.engine.session import Session
from foretoken.errors import ConfigError
from foretoken.lm.views.view import innermost
from foretoken.row import make_row
from foretoken.training.capture import Capture, Tensors
from foretoken.training.dataset.records import Laws, likeliest
from foretoken.types import DecodeState, FinalNorm, Layer, Taps

PIECE = 4096  # places whose logits are made at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts(Capture):
    """Tokens [1 T], states [1 T H] behind the last norm, weights [1 T]: 1 where it wrote."""

    window: int  # T: longer texts lose their beginning, shorter ones are padded

    def read(self, target: Any) -> Taps:
        """The hidden states that are kept of a token, side by side."""
        return (FinalNorm(),)

    def record(self, session: Session, row: DecodeState, text: Sequence[int]) -> Tensors:
        target = innermost(session.target)
        read, before = self.read(target), len(row.tokens)
        whole = make_row([*row.tokens, *text], row.params, row.coins, target.vocab_size)
        taps = (*read, FinalNorm())
        [states] = target.prefill([whole], taps)
        assert states is not None, "they were asked for"
        last = states[-1:]  # stands in where no position is left: no head learns from it
        if target.max_length is None or len(whole.tokens) <= target.max_length:
            [score] = target.grow([whole], [whole.tokens[-1:]], [[-1]], taps)
            assert score.hidden is not None, "as were these"
            last = score.hidden
        target.free([whole])
        states = torch.cat([states, last])
        laws = target.unembed(states[before - 1 : -1, -1])
        found = {
            "input_ids": torch.tensor(whole.tokens),
            "hidden": self.kept(states[:, : len(read)].flatten(1)),
            "weights": (torch.arange(len(whole.tokens)) >= before).float(),
            **self.said(laws, before),
        }
        return {name: self.cut(value) for name, value in found.items()}

    def kept(self, states: Tensor) -> Tensor:
        return states.float().cpu()

    def said(self, logits: Float[Tensor, "n V"], prompt: int) -> Tensors:
        """What else is kept of the laws of a text's tokens, behind a prompt of so many."""
        return {}

    def laws_of(
        self, target: Any, last: Float[Tensor, "n T H"], weights: Float[Tensor, "n T"]
    ) -> Tensors:
        """The same of a batch of texts, from the states behind the target's last layer."""
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

    def said(self, logits: Float[Tensor, "n V"], prompt: int) -> Tensors:
        laws = Laws.likeliest(logits, self.likeliest)
        return {
            "laws": F.pad(laws.tokens, (0, 0, prompt, 0)),
            "log_probs": F.pad(laws.log_probs, (0, 0, prompt, 0)),
        }

    def laws_of(
        self, target: Any, last: Float[Tensor, "n T H"], weights: Float[Tensor, "n T"]
    ) -> Tensors:
        drawn = weights[:, 1:] > 0  # from the law at the token before
        count = min(self.likeliest, target.vocab_size)
        size = (*weights.shape, count)
        tokens = torch.zeros(size, dtype=torch.int, device=last.device)
        log_probs = torch.zeros(size, device=last.device)
        pieces = torch.split(last[:, :-1][drawn], PIECE)
        laws = [likeliest(target.read_out(some), count) for some in pieces]
        tokens[:, 1:][drawn] = torch.cat([best for best, _ in laws])
        log_probs[:, 1:][drawn] = torch.cat([logs for _, logs in laws])
        return {"laws": tokens, "log_probs": log_probs}


@dataclass(frozen=True, kw_only=True, slots=True)
class TappedTexts(Texts):
    """With the outputs of several layers [1 T (L+1)*H], those behind the last norm at the end."""

    taps: tuple[int, ...] | None  # layers; none: a low, a middle and a high one

    def read(self, target: Any) -> Taps:
        return (*map(Layer, self.taps or fused_layers(target.layers)), FinalNorm())


def check_taps(taps: tuple[int, ...] | None, lm: Any) -> None:
    """ConfigError for layers that a target has not, before anything is captured."""
    deepest = max(taps or (0,))
    if deepest >= lm.layers:
        raise ConfigError(
            f"a head that reads the output of layer {deepest} was asked for.",
            f"the target has {lm.layers} layers, counted from 0: the last one is {lm.layers - 1}.",
            "name layers of these, such as `--set taps="
            f"{','.join(map(str, fused_layers(lm.layers)))}`.",
        )


def fused_layers(layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads of a target, by the number of those it has."""
    return tuple(sorted({min(1, layers - 1), (layers - 1) // 2, max(0, layers - 4)}))
