"""A head's decoder beside one target, and what it makes of that target's embeddings.

Sessions over one target share both, as rows of one model share its weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.cached import CachedLM

PIECE = 8192  # tokens whose embeddings are asked for at once
LARGEST = 1 << 26  # numbers of a table that is made for all tokens beforehand


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A target's input embeddings of all its tokens; equal where their bits are."""

    ask: Callable[[Int[Tensor, "n"]], Float[Tensor, "n H"]] = field(compare=False)
    tokens: int
    digest: str

    @classmethod
    def of(cls, ask: Callable[[Int[Tensor, "n"]], Float[Tensor, "n H"]], tokens: int) -> Embeddings:
        bits = hashlib.sha256()
        for piece in pieces(ask, tokens):
            bits.update(piece.cpu().contiguous().view(torch.uint8).numpy())
        return cls(ask, tokens, bits.hexdigest())


def pieces(
    ask: Callable[[Int[Tensor, "n"]], Float[Tensor, "n H"]], tokens: int
) -> Iterator[Float[Tensor, "n H"]]:
    for some in torch.arange(tokens).split(PIECE):
        yield ask(some)


@dataclass(frozen=True, slots=True)
class Opened:
    """`table` [V W], where it is one: what enters at each token beside the state before it."""

    decoder: CachedLM
    table: Float[Tensor, "V W"] | None


@lru_cache(maxsize=2)
def opened(head: Any, positions: int, theirs: Embeddings | None) -> Opened:
    """The decoder of a head, and its table; `theirs` are for heads that read them."""
    weight, table = next(head.parameters()), None
    with torch.no_grad():
        if not head.adds_tokens:
            made = head.decoder(positions)
        elif theirs is None:
            made, table = head.decoder(positions), head.table()
        else:
            made = head.decoder(positions, theirs.ask(head.scored))
            if theirs.tokens * head.width <= LARGEST:
                asked = pieces(theirs.ask, theirs.tokens)
                table = torch.cat([head.table(piece) for piece in asked])
    return Opened(open_lm(made.to(weight.device, weight.dtype), name="draft"), table)
