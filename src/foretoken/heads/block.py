"""DFlash's and DSpark's head: a block of tokens guessed in one pass, from the target's states.

A block is the last token and masks behind it. Every layer looks at the whole block and at keys and
values made of the target's hidden states before it, several layers of them fused, so the depth of
the block costs no further passes (DFlash, arXiv 2602.06036). Its slots do not know each other's
tokens; DSpark (arXiv 2607.05147) corrects a slot's law by the token before it, through a table of
low rank, so that a draft is one sequence. The target's own output layer reads the slots.

Departures: layers are Llama's (no norms of queries and keys), the mask is a vector of its own, and
DSpark's confidence head is left to the house's stopping rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.decoder_layer import EPS, DecoderLayer
from foretoken.heads.table import HeadConfig
from foretoken.types import Layer

FADING = 4.0  # slots after which the weight of a loss has fallen to 1/e; paper 4 for blocks of 8


class Block(nn.Module):
    """As wide as its target. Slot k guesses the token k places behind the last one."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        taps: tuple[int, ...] = (0,)  # layers of the target whose outputs it reads
        depth: int = 4  # tokens guessed
        layers: int = 1
        heads: int = 1  # of the attention
        inner: int = 64  # width of the MLPs
        rank: int = 0  # of the table that corrects laws by the token before; 0: none (DFlash)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.depth, width = config, config.depth, config.hidden_size
        self.reads = tuple(map(Layer, config.taps))
        self.fuse = nn.Linear(len(config.taps) * width, width, bias=False)
        self.state_norm = nn.RMSNorm(width, eps=EPS)
        self.mask = nn.Parameter(0.5 * torch.randn(width))
        self.layers = nn.ModuleList(
            DecoderLayer(width, config.heads, config.inner) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.before = nn.Embedding(config.vocab_size, config.rank) if config.rank else None
        self.after = nn.Linear(config.rank, config.vocab_size, bias=False) if config.rank else None
        if self.after is not None:
            nn.init.zeros_(self.after.weight)

    def remember(
        self, states: Float[Tensor, "B S L H"], positions: Int[Tensor, "B S"]
    ) -> list[Float[Tensor, "B S M"]]:
        """What each layer keeps of the target's states."""
        fused = self.state_norm(self.fuse(states.flatten(-2)))
        return [layer.remember(fused, positions) for layer in self.layers]  # type: ignore[operator]

    def forward(
        self,
        anchors: Float[Tensor, "B A H"],
        positions: Int[Tensor, "B A"],
        sees: Bool[Tensor, "B A S"],
        memories: Sequence[Float[Tensor, "B S M"]],
    ) -> Float[Tensor, "B A depth H"]:
        """What the output layer reads at the slots of blocks that begin with these embeddings.

        `sees` says which rows of the memories each block looks at, beside itself.
        """
        count, blocks, width = anchors.shape
        masks = self.mask.expand(count, blocks, self.depth - 1, width)
        x = torch.cat([anchors[:, :, None], masks], 2).flatten(1, 2)
        places = (positions[..., None] + torch.arange(self.depth, device=x.device)).flatten(1)
        own = torch.eye(blocks, dtype=torch.bool, device=x.device)
        own = own.repeat_interleave(self.depth, 0).repeat_interleave(self.depth, 1)
        every = sees.repeat_interleave(self.depth, 1)
        every = torch.cat([every, own.expand(count, -1, -1)], -1)
        for layer, memory in zip(self.layers, memories, strict=True):
            x = layer(x, places, every, memory)[0]
        found: Tensor = self.norm(x).view(count, blocks, self.depth, width)
        return found

    def correction(
        self, tokens: Int[Tensor, "*n"], scored: Int[Tensor, "n"] | None = None
    ) -> Float[Tensor, "*n V"] | float:
        """What is added to the logits of a slot behind these tokens; those of `scored` alone."""
        if self.before is None or self.after is None:
            return 0.0
        rows = self.after.weight
        return F.linear(self.before(tokens), rows if scored is None else rows[scored])

    def slots(
        self, texts: Mapping[str, Tensor], ends: Any, at: Int[Tensor, "n A"]
    ) -> Float[Tensor, "n A depth H"]:
        """Blocks that begin at these places of whole texts, as `learn` is given them."""
        ids, (count, length) = texts["input_ids"], texts["input_ids"].shape
        states = texts["hidden"].view(count, length, len(self.reads) + 1, -1)[:, :, :-1]
        places = torch.arange(length, device=ids.device)
        memories = self.remember(states, places.expand(count, -1))
        found: Tensor = self(ends.embed(ids.gather(1, at)), at, places < at[..., None], memories)
        return found

    def learn(
        self, texts: Mapping[str, Tensor], ends: Any, at: Int[Tensor, "n A"]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Fading distances to the target's laws in blocks that begin at these places of texts.

        Of texts: "input_ids" [n T], "hidden" [n T (L+1)*H] of the layers read and behind the last
        norm, "weights" [n T], above 0 where it counts. With a correction the distance is a tenth
        cross-entropy and nine tenths total variation, else cross-entropy.
        """
        ids, (count, length) = texts["input_ids"], texts["input_ids"].shape
        slots = self.slots(texts, ends, at)
        final = texts["hidden"].view(count, length, len(self.reads) + 1, -1)[:, :, -1]
        before = at[..., None] + torch.arange(self.depth, device=ids.device)  # whose law it is
        inside = before.clamp(max=length - 2)
        row = torch.arange(count, device=ids.device)[:, None, None]
        counts = (texts["weights"][row, inside + 1] > 0) & (before < length - 1)
        loss, right = final.new_zeros(()), {}
        for slot in range(self.depth):
            some = counts[..., slot]
            places_of = inside[..., slot][some]
            rows_of = row[..., 0].expand_as(some)[some]
            law = ends.unembed(final[rows_of, places_of]).softmax(-1)
            said = ends.unembed(slots[..., slot, :][some])
            said = said + self.correction(ids[rows_of, places_of], ends.scored)
            number = max(1, len(said))
            apart = F.cross_entropy(said, law, reduction="sum") / number
            if self.config.rank:
                lost = (said.softmax(-1) - law).abs().sum() / number
                apart = 0.1 * apart + 0.9 * lost
            loss = loss + math.exp(-slot / FADING) * apart
            truth = ends.places[ids[rows_of, places_of + 1]]
            hits = (said.argmax(-1) == truth).float().sum() / number
            right[f"depth_{slot + 1}"] = hits.detach()
        return loss, right
