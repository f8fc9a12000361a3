"""Chimera's heads: each draft step reads the last three tokens and the whole text before them.

A trigram encoder turns every token and the two before it into one row. One decoder layer lets such
a row look at the target's states behind its last norm, at the rows of the text, and at the rows and
outputs of its own branch; an output stands for the state that the target has not computed yet. A
head for each depth joins it with the last true state (arXiv 2402.15758).

Departures: a head maps 2H numbers to H for the target's own output layer, where the paper gives
each an output layer of its own. In training a draft sees the text's own trigrams before its root,
as when it is used; the paper has it see its neighbours' guesses there. Where a text has no token,
before its first, that one is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.acceptance import ResidualBlock
from foretoken.heads.decoder_layer import DecoderLayer, causal
from foretoken.heads.table import HeadConfig
from foretoken.types import FinalNorm, Taps


class Chimera(nn.Module):
    """As wide as its target. Head k guesses the token k places behind the last one."""

    reads: Taps = (FinalNorm(),)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        depth: int = 4  # heads
        heads: int = 1  # of the attention; the target's own number where it is trained
        inner: int = 64  # width of the MLP; the target's as well

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.depth, width = config, config.depth, config.hidden_size
        self.block = ResidualBlock(3 * width)
        self.narrow = nn.Linear(3 * width, width, bias=False)
        self.layer = DecoderLayer(width, config.heads, config.inner)
        self.residual = nn.ModuleList(
            nn.Linear(2 * width, width, bias=False) for _ in range(config.depth)
        )
        with torch.no_grad():
            for head in self.residual:  # at first the sum of what they read
                head.weight.copy_(torch.eye(width).repeat(1, 2))  # type: ignore[operator]

    def encode(self, embedded: Float[Tensor, "*n 3 H"]) -> Float[Tensor, "*n H"]:
        """Rows of trigrams, from the embeddings of their tokens, the last one last."""
        found: Tensor = self.narrow(self.block(embedded.flatten(-2)))
        return found

    def remember(
        self, rows: Float[Tensor, "B S H"], positions: Int[Tensor, "B S"]
    ) -> Float[Tensor, "B S M"]:
        """What the layer keeps of states, of trigrams or of its own outputs."""
        return self.layer.remember(self.layer.before(rows), positions)

    def forward(
        self,
        rows: Float[Tensor, "B Q H"],
        positions: Int[Tensor, "B Q"],
        sees: Bool[Tensor, "B Q S+Q"],
        memory: Float[Tensor, "B S M"],
    ) -> tuple[Float[Tensor, "B Q H"], Float[Tensor, "B Q M"]]:
        """The layer's outputs at trigrams, and what it keeps of these."""
        found: tuple[Tensor, Tensor] = self.layer(rows, positions, sees, memory)
        return found

    def saying(
        self, step: int, state: Float[Tensor, "*n H"], output: Float[Tensor, "*n H"]
    ) -> Float[Tensor, "*n H"]:
        """What the target's output layer is to read at a draft's step, from 0 on.

        `state` is the target's last one, behind which the root was said.
        """
        found: Tensor = self.residual[step](torch.cat([state, output], -1))
        return found

    def drafts(
        self, texts: Mapping[str, Tensor], ends: Any, begun: Bool[Tensor, "n T-1"]
    ) -> Iterator[tuple[Float[Tensor, "d H"], Float[Tensor, "d V"]]]:
        """The layer's outputs in drafts along texts and their logits, step by step.

        Draft a of a text has the state of token a and the root a + 1; `begun` says which there are.
        Each step reads the likeliest token of the one before it, and sees of earlier steps its own
        draft only. No gradient passes back through what was guessed.
        """
        ids, states = texts["input_ids"], texts["hidden"][:, :-1]
        count, rows = begun.shape
        places = torch.arange(rows, device=ids.device)
        positions = places.expand(count, -1)
        text, own = causal(rows, ids.device)[0], torch.eye(rows, device=ids.device).bool()
        trigrams = places[:, None] + torch.arange(-1, 2, device=ids.device)
        told = ends.embed(ids[:, trigrams.clamp(min=0)])
        memory, sees, seen = self.remember(states, positions), text, text
        for step in range(self.depth):
            at = positions + step + 1
            looks = torch.cat([sees, seen], -1).expand(count, -1, -1)
            found, kept = self(self.encode(told), at, looks, memory)
            logits = ends.unembed(self.saying(step, states[begun], found[begun]))
            yield found[begun], logits
            if step + 1 == self.depth:
                return
            memory = torch.cat([memory, kept, self.remember(found.detach(), at)], 1)
            sees, seen = torch.cat([sees, seen, own], -1), own
            last = torch.zeros_like(told[:, :, 2])
            last[begun] = ends.embed(ends.ids[logits.detach().argmax(-1)])
            told = torch.cat([told[:, :, 1:], last[:, :, None]], 2)

    def learn(
        self, texts: Mapping[str, Tensor], ends: Any, state_weight: float = 0.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of cross-entropies along its own drafts, and how often each depth was right.

        Of texts: "input_ids" [n T], "hidden" [n T H], "weights" [n T], above 0 where it counts; a
        draft is learnt from where its first guess counts. `state_weight` is that of the squared
        distance between first outputs and the states that the target computes there.
        """
        ids, hidden, weights = texts["input_ids"], texts["hidden"], texts["weights"]
        begun = F.pad(weights[:, 2:] > 0, (0, 1))
        row, place = begun.nonzero(as_tuple=True)
        loss, right = hidden.new_zeros(()), {}
        for step, (found, logits) in enumerate(self.drafts(texts, ends, begun)):
            guessed = place + step + 2
            inside = guessed.clamp(max=ids.shape[1] - 1)
            counts = (weights[row, inside] > 0) & (guessed < ids.shape[1])
            labels, said = ends.places[ids[row, inside][counts]], logits[counts]
            number = max(1, len(labels))
            loss = loss + F.cross_entropy(said, labels, reduction="sum", ignore_index=-1) / number
            if step == 0 and state_weight:
                apart = F.mse_loss(found, hidden[row, place + 1], reduction="sum")
                loss = loss + state_weight * apart / (number * hidden.shape[-1])
            hits = (said.argmax(-1) == labels).float().sum() / number
            right[f"depth_{step + 1}"] = hits.detach()
        return loss, right
