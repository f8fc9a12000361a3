"""Decision models of improved multi-candidate speculation (arXiv 2409.10644): draft one more level?

One margin per branch. The soft model reads the draft model's last hidden layer where a guess is
about to be drawn, and learns the guess's chance of acceptance; the hard one reads entropy and
largest probabilities of the law it is drawn from, and learns whether the guess is the target's
best token.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foretoken.heads import store

KIND = "decision"
MODELS = ("soft", "hard")
TOP = 10  # probabilities of the draft law that are read beside its entropy


class DecisionHead(nn.Module):
    """A small network of ReLUs; its shape follows from what it reads."""

    def __init__(self, hidden_size: int, vocab_size: int, *, model: str = "soft") -> None:
        super().__init__()
        self.hidden_size, self.vocab_size, self.model = hidden_size, vocab_size, model
        sizes: tuple[int, ...]
        if model == "soft":  # 768-512-256-1 in the paper
            sizes = (hidden_size, max(2 * hidden_size // 3, 1), max(hidden_size // 3, 1), 1)
        else:  # 11-44-1
            seen = 1 + min(TOP, vocab_size)
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


def save(folder: str | Path, head: DecisionHead, notes: Mapping[str, Any]) -> Path:
    """Write a head so that `load` finds it."""
    card = store.Card(
        kind=KIND,
        hidden_size=head.hidden_size,
        vocab_size=head.vocab_size,
        options={"model": head.model},
        notes=notes,
    )
    return store.save(folder, head, card)


def load(folder: str | Path) -> tuple[DecisionHead, store.Card]:
    """The head of a folder, frozen, and its card."""
    card = store.read_card(folder, KIND)
    try:
        head = DecisionHead(card.hidden_size, card.vocab_size, **card.options)
    except TypeError as error:
        raise store.broken(folder, KIND, f"unknown options ({error})") from error
    store.load_into(head, folder, KIND)
    return head, card
