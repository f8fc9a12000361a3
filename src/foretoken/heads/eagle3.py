"""EAGLE-3's head: a small decoder that reads tokens beside hidden states of the target.

To every token's embedding it adds what it makes of the state before it: three layers of the target,
fused, where the target has read the text, and its own output where it goes on alone (a few more
rows of its output layer, so that a level of a draft is one forward and a sum). It learns to
live on its own outputs (training-time test) and is asked for laws only, never for the target's
states (arXiv 2503.01840).

Departures: the state enters the residual stream, where the paper widens the first attention's
input, so that behind it stands an ordinary Llama, which runs as one; the head is as narrow as is
asked, where the paper's is as wide as its target, and embeds tokens by the rows that score them.
So a draft model is such a head that hears nothing of the target's states, and may become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.decoder_layer import EPS, DecoderLayer
from foretoken.heads.llama import as_llama, llama_of
from foretoken.heads.table import HeadConfig
from foretoken.types import Layer, Taps


class Eagle3(nn.Module):
    """What it goes on with is `width` wide; it scores `tokens` of the target's vocabulary."""

    begins = 0
    goes_on = None  # its outputs behind those of tokens are what it goes on with
    adds_tokens = True  # `table` has a row for each, to which the state before it is added
    scored: Int[Tensor, "n"]  # the target's id of each output

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        taps: tuple[int, ...] = (0,)  # layers of the target whose outputs it reads
        tokens: int = 0  # outputs; 0: one for each token of the target
        width: int = 64
        layers: int = 1
        heads: int = 1  # of the attention
        inner: int = 256  # width of the MLPs
        embeds: bool = True  # tokens by the rows that score them; else by the target's embeddings
        own_rows: bool = True  # for its outputs; else they are a map of the target's embeddings

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.width = config, config.width
        width = config.width
        self.fuse = nn.Linear(len(config.taps) * config.hidden_size, width, bias=False)
        self.state_norm = nn.RMSNorm(width, eps=EPS)
        self.join = nn.Linear(width, width, bias=False)
        self.hear = nn.Linear(width, width, bias=False)
        if config.embeds:
            self.embedding = nn.Embedding(config.vocab_size, width)
        else:
            self.enter = nn.Linear(config.hidden_size, width)
        if self.maps_outputs:
            self.score = nn.Linear(config.hidden_size, width, bias=False)
        elif not config.embeds:
            self.rows = nn.Embedding(config.tokens or config.vocab_size, width)
        self.layers = nn.ModuleList(
            DecoderLayer(width, config.heads, config.inner) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.register_buffer("scored", torch.arange(config.tokens or config.vocab_size))

    def reads_of(self, layers: int) -> Taps:
        """The layers it was trained on."""
        return tuple(map(Layer, self.config.taps))

    @property
    def reads_embeddings(self) -> bool:
        """Whether its tables are made of the target's embeddings."""
        return not self.config.embeds

    @property
    def maps_outputs(self) -> bool:
        """Whether the rows that score tokens are a map of the target's embeddings."""
        return not (self.config.embeds or self.config.own_rows)

    def outputs(self, theirs: Float[Tensor, "n H"] | None = None) -> Float[Tensor, "n W"]:
        """The rows that score tokens; `theirs` are the target's embeddings of those tokens."""
        if self.maps_outputs:
            mapped: Tensor = self.score(theirs)
            return mapped
        table: Tensor = self.embedding.weight if self.config.embeds else self.rows.weight
        return table[self.scored] if self.config.embeds else table

    def fused(self, states: Float[Tensor, "*n L H"]) -> Float[Tensor, "*n W"]:
        """What is added to the embeddings behind the target's hidden states."""
        found: Tensor = self.join(self.state_norm(self.fuse(states.flatten(-2))))
        return found

    @property
    def fusing(self) -> tuple[nn.Linear, nn.RMSNorm, nn.Linear]:
        """The modules of `fused`, one behind another."""
        return self.fuse, self.state_norm, self.join

    def heard(self, states: Float[Tensor, "*n W"]) -> Float[Tensor, "*n W"]:
        """What is added behind states of its own, before its norm."""
        found: Tensor = self.hear(self.norm(states))
        return found

    def entering(
        self, tokens: Int[Tensor, "*n"], before: Float[Tensor, "*n W"], embed: Any = None
    ) -> Float[Tensor, "*n W"]:
        """What enters the layers at tokens, with what was made of the states before them.

        `embed(tokens)` gives the target's input embeddings.
        """
        if self.config.embeds:
            return F.embedding(tokens, self.table()) + before
        return self.table(embed(tokens)) + before

    def table(self, theirs: Float[Tensor, "*n H"] | None = None) -> Float[Tensor, "*n W"]:
        """Rows of tokens; `theirs` are the target's embeddings of them, None where it has its own:
        then all of them.
        """
        found: Tensor = self.embedding.weight if theirs is None else self.enter(theirs)
        return found

    def forward(
        self,
        entering: Float[Tensor, "B Q W"],
        positions: Int[Tensor, "B Q"],
        sees: Bool[Tensor, "B Q S+Q"],
        memories: Sequence[Float[Tensor, "B S M"]],
    ) -> tuple[Float[Tensor, "B Q W"], list[Float[Tensor, "B Q M"]]]:
        """States behind the last layer, before its norm, and what each layer adds to its memory."""
        states, kept = entering, []
        for layer, memory in zip(self.layers, memories, strict=True):
            states, new = layer(states, positions, sees, memory)
            kept.append(new)
        return states, kept

    @torch.no_grad()
    def begin_as(self, draft: Any) -> None:
        """Take the weights of an ordinary Llama of this shape, deaf to the target's states."""
        weights = draft.state_dict()
        self.embedding.weight.copy_(weights["model.embed_tokens.weight"])
        self.norm.weight.copy_(weights["model.norm.weight"])
        for i, layer in enumerate(self.layers):
            for name, part in as_llama(layer).items():
                part.copy_(weights[f"model.layers.{i}.{name}"])
        for deaf in (self.join, self.hear):
            deaf.weight.zero_()

    def decoder(self, positions: int, theirs: Float[Tensor, "n H"] | None = None) -> Any:
        """Its layers, norm and outputs as a model of transformers, with weights of its own."""
        outputs = torch.cat([self.outputs(theirs), self.hear.weight])
        return llama_of(self.layers, self.norm, outputs, positions)
