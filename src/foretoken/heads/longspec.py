"""LongSpec's head: one block whose long memory is the target's own KV cache (arXiv 2502.17421).

A token's embedding passes self-attention over a sliding window, then cross-attention with queries
of its own over keys and values that the target's last layer keeps of the text before the draft,
then an MLP; the target's output layer reads the sum. So of a context, however long, the head keeps
a window and nothing else. No node of a draft sees what the target has not verified.

Departures: the window's rotation is the house's and not the target's, as only distances up to a
window enter it, so that targets without rotary positions have the same head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.decoder_layer import EPS, rotated
from foretoken.heads.table import HeadConfig
from foretoken.types import Taps


class LongSpec(nn.Module):
    """As wide as its target, and with its number of heads where it is trained."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        window: int = 512  # tokens that its self-attention sees, the present one included
        heads: int = 1  # of the self-attention
        kv_heads: int = 1  # keys and values of it; queries share them
        inner: int = 64  # width of the MLP
        asked: int = 0  # width of the cross-attention's queries, all heads; 0: the hidden size

    reads: Taps = ()  # it looks at the target's keys and values, and at no states

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.window, width = config, config.window, config.hidden_size
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.size = 2 * -(-width // (2 * self.heads))  # rotary pairs: an even size
        self.asked = config.asked or width
        self.before = nn.RMSNorm(width, eps=EPS)
        self.attention = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.size)
        self.joined = nn.Linear(self.heads * self.size, width, bias=False)
        self.between = nn.RMSNorm(width, eps=EPS)
        self.ask = nn.Linear(width, self.asked)
        self.told = nn.Linear(self.asked, width, bias=False)
        self.behind = nn.RMSNorm(width, eps=EPS)
        self.gate = nn.Linear(width, config.inner, bias=False)
        self.up = nn.Linear(width, config.inner, bias=False)
        self.down = nn.Linear(config.inner, width, bias=False)

    def entered(
        self, x: Float[Tensor, "B Q H"], positions: Int[Tensor, "B Q"]
    ) -> tuple[
        Float[Tensor, "B Q heads size"],
        Float[Tensor, "B Q kv_heads size"],
        Float[Tensor, "B Q kv_heads size"],
    ]:
        """Queries, keys and values of the self-attention; they depend on tokens and places only."""
        every = self.attention(self.before(x)).view(*x.shape[:2], -1, self.size)
        query, key, value = every.split([self.heads, self.kv_heads, self.kv_heads], 2)
        return rotated(query, positions), rotated(key, positions), value

    def asking(self, x: Float[Tensor, "B Q H"], size: int) -> Float[Tensor, "B Q heads size"]:
        """Queries of the cross-attention, not rotated; `size` is that of the target's keys."""
        return self.ask(self.between(x)).view(*x.shape[:2], -1, size)  # type: ignore[no-any-return]

    def left(
        self, x: Float[Tensor, "B Q H"], told: Float[Tensor, "B Q W"]
    ) -> Float[Tensor, "B Q H"]:
        """What the output layer reads, from the residual stream and what the target's rows told."""
        x = x + self.told(told)
        normed = self.behind(x)
        found: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return found

    def forward(
        self,
        x: Float[Tensor, "B T H"],
        positions: Int[Tensor, "B T"],
        keys: Float[Tensor, "B T heads size"],
        values: Float[Tensor, "B T heads size"],
        late: int,
        rotate: Any,
    ) -> Float[Tensor, "B T H"]:
        """What the output layer reads at every token of texts, as at depth `late` of a draft.

        `keys` are the target's as it rotates them at these positions; `rotate(states [n heads
        size], positions [n])` does the same to queries.
        """
        query, key, value = self.entered(x, positions)
        apart = positions[:, :, None] - positions[:, None]
        sees = (apart < self.window).tril()[:, None]  # positions rise
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=sees, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.joined(mixed.transpose(1, 2).flatten(2))
        asking = self.asking(x, keys.shape[-1])
        asking = rotate(asking.flatten(0, 1), positions.flatten()).view_as(asking)
        return self.left(x, withheld(asking, keys, values, late))

    def learn(
        self, texts: Mapping[str, Tensor], ends: Any, late: int, rotate: Any
    ) -> tuple[Tensor, Float[Tensor, ""]]:
        """Cross-entropy of a text's tokens, each guessed from the one before it, as at that depth
        of a draft; and the share of right guesses.

        Of texts: "input_ids" and "positions" [n T], "keys" and "values" [n T heads size] of the
        target at these positions, "weights" [n T], above 0 where it counts.
        """
        ids = texts["input_ids"]
        x = ends.embed(ids)
        memory = texts["keys"].to(x), texts["values"].to(x)
        states = self(x, texts["positions"], *memory, late, rotate)
        counts = texts["weights"][:, 1:] > 0
        logits = ends.unembed(states[:, :-1][counts])
        labels = ends.places[ids[:, 1:][counts]]  # -1: not scored
        number = max(1, len(labels))
        loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-1) / number
        return loss, ((logits.argmax(-1) == labels).float().sum() / number).detach()


def attended(
    query: Float[Tensor, "n heads size"],
    keys: Float[Tensor, "kv_heads S size"],
    values: Float[Tensor, "kv_heads S size"],
    mask: Float[Tensor, "n S"] | None = None,
) -> Float[Tensor, "n W"]:
    """Attention of one row's nodes, heads side by side; zeros where there is nothing to see.

    Queries of heads that share keys are asked as further rows, so that no key is copied.
    """
    count, heads, size = query.shape
    kept = len(keys)
    if not keys.shape[1]:
        return query.new_zeros(count, heads * size)
    rows = query.view(count, kept, -1, size).permute(1, 2, 0, 3).reshape(kept, -1, size)
    every = None if mask is None else mask.repeat(heads // kept, 1)
    mixed = F.scaled_dot_product_attention(rows[None], keys[None], values[None], attn_mask=every)
    return mixed.view(kept, -1, count, size).permute(2, 0, 1, 3).reshape(count, -1)


def withheld(
    query: Float[Tensor, "B T heads size"],
    keys: Float[Tensor, "B T kv_heads size"],
    values: Float[Tensor, "B T kv_heads size"],
    late: int,
) -> Float[Tensor, "B T W"]:
    """Attention in which the token at t sees rows up to t - `late`; zeros where that is none.

    Queries and rows are cut to equal length, which leaves a causal mask that fused kernels have
    built in (flash noisy training).
    """
    if late >= query.shape[1]:
        return torch.zeros_like(query).flatten(2)
    rows, key, value = (
        part.transpose(1, 2)
        for part in (query[:, late:], keys[:, :-late], values[:, :-late])
    )  # fmt: skip
    mixed = F.scaled_dot_product_attention(
        rows, key, value, is_causal=True, enable_gqa=query.shape[2] != keys.shape[2]
    )
    return F.pad(mixed.transpose(1, 2).flatten(2), (0, 0, late, 0))
