"""A head's decoder beside one target, and what it makes of that target's embeddings.

Sessions over one target share both, as rows of one model share its weights. They are made of the
embeddings as they are when the first of them opens the head: where these change later, guesses get
worse, and no text does.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.heads.sizes import has_table
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.cached import CachedLM

PIECE = 8192  # tokens whose embeddings are asked for at once
KEPT = 2  # heads with their decoders, for the next session

Ask = Callable[[Int[Tensor, "n"]], Float[Tensor, "n H"]]  # the target's input embeddings of tokens


@dataclass(frozen=True, slots=True)
class Opened:
    """`table` [V W], where it is one: what enters at each token beside the state before it."""

    decoder: CachedLM
    table: Float[Tensor, "V W"] | None


_known: OrderedDict[tuple[Any, int, str], Opened] = OrderedDict()
_turn = Lock()


def opened(head: Any, positions: int, tokens: int, ask: Ask) -> Opened:
    """The decoder of a head over a target of so many tokens, and its table."""
    reads = head.adds_tokens and head.reads_embeddings
    key = head, positions, digest(ask, tokens) if reads and is_made(head, tokens) else ""
    with _turn:
        if key not in _known:
            _known[key] = made(head, positions, tokens, ask)
            if len(_known) > KEPT:
                _known.popitem(last=False)
        _known.move_to_end(key)
        return _known[key]


def is_made(head: Any, tokens: int) -> bool:
    """Whether anything is made of the target's embeddings beforehand."""
    return bool(head.maps_outputs) or has_table(head, tokens)


def digest(ask: Ask, tokens: int) -> str:
    """What tells a target's embeddings from others."""
    bits = hashlib.sha256()
    for piece in pieces(ask, tokens):
        bits.update(piece.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def pieces(ask: Ask, tokens: int) -> Iterator[Float[Tensor, "n H"]]:
    for some in torch.split(torch.arange(tokens), PIECE):
        yield ask(some)


@torch.no_grad()
def made(head: Any, positions: int, tokens: int, ask: Ask) -> Opened:
    """Both, from the target's embeddings where the head reads them."""
    weight, table = next(head.parameters()), None
    if not head.adds_tokens:
        decoder = head.decoder(positions)
    else:
        decoder = head.decoder(positions, ask(head.scored) if head.maps_outputs else None)
        if not head.reads_embeddings:
            table = head.table()
        elif has_table(head, tokens):
            table = weight.new_empty(tokens, head.width)
            for at, piece in zip(range(0, tokens, PIECE), pieces(ask, tokens), strict=True):
                table[at : at + PIECE] = head.table(piece)
    return Opened(open_lm(decoder.to(weight.device, weight.dtype), name="draft"), table)
