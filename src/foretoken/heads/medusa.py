"""Medusa's parallel heads: every depth guessed from the same state (arXiv 2401.10774).

Head d reads the target's state behind the last norm, from which the target itself says the next
token, and guesses the token d + 1 places behind that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.acceptance import ResidualBlock
from foretoken.heads.table import HeadConfig

FADING = 0.8  # weight of a depth's loss, as a part of the one before; paper 0.8


class Medusa(nn.Module):
    """Per depth: residual blocks, the identity at first, then an output layer of its own."""

    scored: Int[Tensor, "n"]

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        depth: int = 4  # heads
        blocks: int = 1  # residual blocks of each
        tokens: int = 0  # outputs of each; 0: one for each token of the target

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.depth = config, config.depth
        width, size = config.hidden_size, config.tokens or config.vocab_size
        self.heads = nn.ModuleList(
            nn.Sequential(
                *[ResidualBlock(width) for _ in range(config.blocks)],
                nn.Linear(width, size, bias=False),
            )
            for _ in range(config.depth)
        )
        # the target's id of each output; kept where they are not all of them
        self.register_buffer("scored", torch.arange(size), persistent=bool(config.tokens))

    def start_from(self, output: Float[Tensor, "k H"]) -> None:
        """Every head says what the target's output layer does, until it is trained."""
        with torch.no_grad():
            for head in self.heads:
                head[-1].weight.copy_(output)  # type: ignore[index]

    def forward(self, states: Float[Tensor, "n H"]) -> Float[Tensor, "n depth k"]:
        """Logits of the tokens 2 to `depth` + 1 places behind each state's own."""
        return torch.stack([head(states) for head in self.heads], 1)

    def learn(self, texts: Mapping[str, Tensor], ends: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of fading cross-entropies, and each depth's share of right first guesses.

        Of texts: "input_ids" [n T], "hidden" [n T H], "weights" [n T], above 0 where it counts.
        """
        loss, right = texts["hidden"].new_zeros(()), {}
        for depth, head in enumerate(self.heads):
            ahead = depth + 2  # the target's own output layer guesses one ahead
            counts = texts["weights"][:, ahead:] > 0
            labels = ends.places[texts["input_ids"][:, ahead:][counts]]  # -1: none of its outputs
            logits = head(texts["hidden"][:, : counts.shape[1]][counts])
            entropy = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-1)
            number = max(1, len(labels))
            loss = loss + FADING**depth * entropy / number
            hits = (logits.argmax(-1) == labels).float().sum() / number
            right[f"depth_{depth + 1}"] = hits.detach()
        return loss, right
