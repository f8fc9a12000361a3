"""Hydra's heads: one for each depth, each of which reads the tokens drafted so far.

Head i reads the target's last hidden state and the embeddings of the root and of the i - 1 tokens
guessed below it, and guesses the token i places behind the root (arXiv 2402.05109). Medusa's heads
do not know what was guessed before them. Departure: all heads are read by the target's own output
layer, where the paper gives each a copy to train; laws are learnt, not tokens (Hydra++).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.table import HeadConfig
from foretoken.types import FinalNorm, Taps

FADING = 0.8  # weight of a depth's loss, as a part of the one before


class Hydra(nn.Module):
    """Per depth two linear maps of all that is read, one behind SiLU; at first the state itself."""

    reads: Taps = (FinalNorm(),)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        depth: int = 4  # heads

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.depth, width = config, config.depth, config.hidden_size
        sizes = [(i + 2) * width for i in range(config.depth)]
        self.straight = nn.ModuleList(nn.Linear(size, width, bias=False) for size in sizes)
        self.bent = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        for straight, bent in zip(self.straight, self.bent, strict=True):
            nn.init.eye_(straight.weight)  # type: ignore[arg-type]
            nn.init.zeros_(bent.weight)  # type: ignore[arg-type]
            nn.init.zeros_(bent.bias)  # type: ignore[arg-type]

    def forward(
        self, state: Float[Tensor, "*n H"], path: Float[Tensor, "*n k H"]
    ) -> Float[Tensor, "*n H"]:
        """What the output layer is to read, behind the root and k - 1 tokens below it."""
        which = path.shape[-2] - 1
        read = torch.cat([state, path.flatten(-2)], -1)
        found: Tensor = self.straight[which](read) + F.silu(self.bent[which](read))
        return found

    def learn(self, texts: Mapping[str, Tensor], ends: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Fading cross-entropies to the target's laws, and each depth's share of right guesses.

        Of texts: "input_ids" [n T], "hidden" [n T H], "weights" [n T], above 0 where it counts.
        """
        ids, hidden, embedded = texts["input_ids"], texts["hidden"], ends.embed(texts["input_ids"])
        loss, right = hidden.new_zeros(()), {}
        for depth in range(1, self.depth + 1):
            ahead = depth + 1  # the token guessed, counted from the state that is read
            length = ids.shape[1] - ahead
            if length < 1:
                break
            counts = texts["weights"][:, ahead:] > 0
            path = torch.stack([embedded[:, i : i + length] for i in range(1, ahead)], -2)
            said = ends.unembed(self(hidden[:, :length][counts], path[counts]))
            law = ends.unembed(hidden[:, depth : depth + length][counts]).softmax(-1)
            number = max(1, len(said))
            entropy = F.cross_entropy(said, law, reduction="sum") / number
            loss = loss + FADING ** (depth - 1) * entropy
            hits = (said.argmax(-1) == ends.places[ids[:, ahead:][counts]]).float().sum() / number
            right[f"depth_{depth}"] = hits.detach()
        return loss, right
