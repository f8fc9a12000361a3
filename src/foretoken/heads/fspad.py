"""FSPAD's head: EAGLE's, with two of its burdens lifted (arXiv 2408.15562).

A state does not say which token was drawn from it, so the token's embedding gates the joined state
in a wider space first (feature sampling). And one vector need not be the target's next state and
the source of a law at once: a second MLP makes of the guessed state what the output layer reads,
and the loss of laws goes through it, that of states does not (partial alignment).

Departure: the paper's last MLP gives both halves side by side; here the half that predicts stands
behind the half that goes on, as a layer whose attention is nothing, so that both run as one Llama.
So laws teach the half that goes on as well. They cannot pass it by: where what it adds counts as a
constant, it learns to undo whatever laws teach the layer below, and both losses grow a
hundredfold; where laws stop before it, fewer guesses are right (docs/LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.decoder_layer import EPS, DecoderLayer
from foretoken.heads.eagle import Eagle
from foretoken.heads.llama import llama_of
from foretoken.types import Layer


class Fspad(Eagle):
    """Its second layer is an MLP only: what the output layer reads."""

    goes_on = Layer(0)

    def __init__(self, config: Eagle.Config) -> None:
        super().__init__(config)
        width, inner = config.hidden_size, config.inner
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.fused_norm = nn.RMSNorm(width, eps=EPS)
        self.predict = DecoderLayer(width, config.heads, inner, normed=False)
        for unused in (self.predict.attention, self.predict.joined):
            unused.requires_grad_(False)
        for begun in (self.down, self.predict.joined, self.predict.down):
            nn.init.zeros_(begun.weight)

    def entering(
        self, tokens: Int[Tensor, "*n"], before: Float[Tensor, "*n H"], embed: Any
    ) -> Float[Tensor, "*n H"]:
        """Embeddings and the states before them, joined, then gated by the embeddings."""
        embedded = embed(tokens)
        joined = self.join(torch.cat([embedded, before], -1))
        wide = F.silu(self.gate(embedded)) * self.up(self.fused_norm(joined))
        found: Tensor = joined + self.down(wide)
        return found

    def saying(self, guessed: Float[Tensor, "*n H"]) -> Float[Tensor, "*n H"]:
        """What the output layer reads, made of guessed states by an MLP."""
        layer = self.predict
        normed = layer.between(guessed)
        found: Tensor = guessed + layer.down(F.silu(layer.gate(normed)) * layer.up(normed))
        return found

    def decoder(self, positions: int) -> Any:
        """Both layers as a model of transformers."""
        return llama_of([self.layer, self.predict], None, None, positions)
