"""The acceptance head of SpecDec++ (arXiv 2405.19715): will the target accept this token?

It reads what the draft model's output head reads, at the position of the token in question, so it
is ready one draft forward after the token was drawn, at no further cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads import store

KIND = "acceptance"


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)  # half a SiLU of zero: the block starts as the identity
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Float[Tensor, "*n H"]) -> Float[Tensor, "*n H"]:
        return x + F.silu(self.linear(x))


class AcceptanceHead(nn.Module):
    """Residual blocks, then two logits: rejected, accepted.

    The released code repeats one block, so its blocks share weights; `shared` is for such heads.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        blocks: int = 3,
        shared: bool = False,
        temperature: float = 1.0,
        shift: float = 0.0,
    ) -> None:
        super().__init__()
        self.depth, self.shared = blocks, shared
        made = [ResidualBlock(hidden_size) for _ in range(1 if shared else blocks)]
        self.blocks = nn.ModuleList(made)
        self.out = nn.Linear(hidden_size, 2)
        self.temperature, self.shift = temperature, shift  # calibration, found after training

    def forward(self, hidden: Float[Tensor, "*n H"]) -> Float[Tensor, "*n 2"]:
        """Logits before calibration."""
        for i in range(self.depth):
            hidden = self.blocks[0 if self.shared else i](hidden)
        logits: Tensor = self.out(hidden)
        return logits

    def accepted(self, hidden: Float[Tensor, "*n H"]) -> Float[Tensor, "*n"]:
        """The calibrated probability that the token is accepted."""
        logits = self(hidden.to(self.out.weight.dtype))
        margin = logits[..., 1] - logits[..., 0]
        chance: Tensor = (margin / self.temperature + self.shift).sigmoid()
        return chance


def save(
    folder: str | Path, head: AcceptanceHead, vocab_size: int, notes: Mapping[str, Any]
) -> Path:
    """Write a head so that `load` finds it."""
    card = store.Card(
        kind=KIND,
        hidden_size=head.out.in_features,
        vocab_size=vocab_size,
        options={
            "blocks": head.depth,
            "shared": head.shared,
            "temperature": head.temperature,
            "shift": head.shift,
        },
        notes=notes,
    )
    return store.save(folder, head, card)


def load(folder: str | Path) -> tuple[AcceptanceHead, store.Card]:
    """The head of a folder, frozen, and its card."""
    card = store.read_card(folder, KIND)
    try:
        head = AcceptanceHead(card.hidden_size, **card.options)
    except TypeError as error:
        raise store.broken(folder, KIND, f"unknown options ({error})") from error
    store.load_into(head, folder, KIND)
    return head, card
