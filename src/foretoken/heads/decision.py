"""Decision models of improved multi-candidate speculation (arXiv 2409.10644): draft one more level?

One margin per branch. The soft model reads the draft model's last hidden layer where a guess is
about to be drawn, and learns the guess's chance of acceptance; the hard one reads entropy and
largest probabilities of the law it is drawn from, and learns whether the guess is the target's
best token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foretoken.heads.table import HeadConfig

MODELS = ("soft", "hard")
TOP = 10  # probabilities of the draft law that are read beside its entropy


class DecisionHead(nn.Module):
    """A small network of ReLUs; its shape follows from what it reads."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        model: str = "soft"  # or "hard"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.model = config, config.model
        width = config.hidden_size
        sizes: tuple[int, ...]
        if config.model == "soft":  # 768-512-256-1 in the paper
            sizes = (width, max(2 * width // 3, 1), max(width // 3, 1), 1)
        else:  # 11-44-1
            seen = 1 + min(TOP, config.vocab_size)
            sizes = (seen, 4 * seen, 1)
        layers: list[nn.Module] = []
        for narrow, wide in pairwise(sizes):
            layers += [nn.Linear(narrow, wide), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, seen: Float[Tensor, "*n F"]) -> Float[Tensor, "*n"]:
        """Margins: above zero where a guess is more likely good than not."""
        margins: Tensor = self.layers(seen)
        return margins[..., 0]

    def likely(self, seen: Float[Tensor, "*n F"]) -> Float[Tensor, "*n"]:
        """How likely a guess from here is good."""
        weight = next(self.parameters())
        chances: Tensor = self(seen.to(weight.dtype)).sigmoid()
        return chances


def certainty(laws: Float[Tensor, "n V"]) -> Float[Tensor, "n F"]:
    """What the hard model reads: entropy in nats, then the largest probabilities."""
    top = laws.topk(min(TOP, laws.shape[-1])).values.float()
    entropy = -laws.xlogy(laws).sum(-1, keepdim=True).float()
    return torch.cat([entropy, top], -1)
