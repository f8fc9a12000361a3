"""One decoder layer for feature heads; keys and values are handed in and out, a head keeps none.

Rotary positions, attention, a gated MLP: Llama's layer (arXiv 2302.13971). What it remembers of a
token is one row of numbers, so whoever drafts with it can store rows of any head alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

BASE = 10_000.0  # of the rotary frequencies
EPS = 1e-6  # of the norms


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """In what attention differs between families of models."""

    kv_heads: int = 0  # that keys and values have; 0: as many as queries (arXiv 2305.13245)
    size: int = 0  # of one; 0: the width over the heads
    base: float = BASE
    eps: float = EPS
    bias: bool = False  # of queries, keys and values, as Qwen2 has it


ORDINARY = AttentionShape()


class DecoderLayer(nn.Module):
    """Reads the rows of tokens before it, [B S M], and adds those of the tokens it is fed."""

    def __init__(
        self,
        width: int,
        heads: int,
        inner: int,
        *,
        normed: bool = True,
        shape: AttentionShape = ORDINARY,
    ) -> None:
        super().__init__()
        self.heads, self.shared = heads, shape.kv_heads or heads
        self.size = shape.size or 2 * -(-width // (2 * heads))  # rotary pairs: an even size
        self.base, self.eps = shape.base, shape.eps
        self.before = nn.RMSNorm(width, eps=self.eps) if normed else nn.Identity()
        self.attention = nn.Linear(width, sum(self.sizes), bias=shape.bias)
        self.joined = nn.Linear(heads * self.size, width, bias=False)
        self.between = nn.RMSNorm(width, eps=self.eps)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    @property
    def memory_size(self) -> int:
        """Numbers kept of a token: its key and its value."""
        return 2 * self.shared * self.size

    @property
    def sizes(self) -> list[int]:
        """Rows of the attention's first map: of queries, keys and values."""
        return [self.heads * self.size, self.shared * self.size, self.shared * self.size]

    def remember(
        self, states: Float[Tensor, "B Q H"], positions: Int[Tensor, "B Q"]
    ) -> Float[Tensor, "B Q M"]:
        """Rows of states that are looked at and ask nothing; they pass no norm."""
        first, bias = self.heads * self.size, self.attention.bias
        known = self.attention.weight[first:]
        shape = (*states.shape[:2], 2, self.shared, self.size)
        made = F.linear(states, known, None if bias is None else bias[first:])
        key, value = made.view(shape).unbind(2)
        return torch.stack([rotated(key, positions, self.base), value], 2).flatten(2)

    def forward(
        self,
        x: Float[Tensor, "B Q H"],
        positions: Int[Tensor, "B Q"],
        sees: Bool[Tensor, "B Q S+Q"],
        memory: Float[Tensor, "B S M"],
    ) -> tuple[Float[Tensor, "B Q H"], Float[Tensor, "B Q M"]]:
        """States behind the layer, and the rows of the tokens fed now."""
        made = self.attention(self.before(x)).split(self.sizes, -1)
        query, key, value = (part.unflatten(-1, (-1, self.size)) for part in made)
        query, key = rotated(query, positions, self.base), rotated(key, positions, self.base)
        kept = torch.stack([key, value], 2)  # [B Q 2 heads size]
        every = torch.cat([memory.view(*memory.shape[:2], *kept.shape[2:]), kept], 1)
        keys, values = every.transpose(1, 3).unbind(2)  # [B heads S+Q size]
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=sees[:, None],
            enable_gqa=self.shared < self.heads,
        )  # fmt: skip
        x = x + self.joined(mixed.transpose(1, 2).flatten(2))
        normed = self.between(x)
        x = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x, kept.flatten(2)


def rotated(
    x: Float[Tensor, "B Q heads size"], positions: Int[Tensor, "B Q"], base: float = BASE
) -> Float[Tensor, "B Q heads size"]:
    """Rotary position embedding (arXiv 2104.09864), halves paired."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[..., None] * rates)[:, :, None]  # [B Q 1 half]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def causal(tokens: int, device: torch.device | None = None) -> Bool[Tensor, "1 Q Q"]:
    """Who sees whom in a text: every token itself and those before it."""
    return torch.ones(1, tokens, tokens, dtype=torch.bool, device=device).tril()
