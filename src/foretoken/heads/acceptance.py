"""The acceptance head of SpecDec++ (arXiv 2405.19715): will the target accept this token?

It reads what the draft model's output head reads, at the position of the token in question, so it
is ready one draft forward after the token was drawn, at no further cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.table import HeadConfig


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
    """Residual blocks, then two logits: rejected, accepted."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        blocks: int = 3
        shared: bool = False  # one block, repeated: the released code's
        temperature: float = 1.0  # this and the shift are found after training: m / t + s
        shift: float = 0.0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        made = 1 if config.shared else config.blocks
        self.blocks = nn.ModuleList([ResidualBlock(config.hidden_size) for _ in range(made)])
        self.out = nn.Linear(config.hidden_size, 2)

    def forward(self, hidden: Float[Tensor, "*n H"]) -> Float[Tensor, "*n 2"]:
        """Logits before calibration."""
        for i in range(self.config.blocks):
            hidden = self.blocks[0 if self.config.shared else i](hidden)
        logits: Tensor = self.out(hidden)
        return logits

    def accepted(self, hidden: Float[Tensor, "*n H"]) -> Float[Tensor, "*n"]:
        """The calibrated probability that the token is accepted."""
        logits = self(hidden.to(self.out.weight.dtype))
        margin = logits[..., 1] - logits[..., 0]
        chance: Tensor = (margin / self.config.temperature + self.config.shift).sigmoid()
        return chance
