"""A request as one row of a batch: its tokens, its options, its coins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foretoken.coins import Coins, SeededCoins
from foretoken.types import DecodeState, Finish, Rows, SamplingParams
from foretoken.warp import Warp

Ended = Callable[[DecodeState], Finish | None]


class Turn(list[int]):
    """Token ids of a chat, behind which an answer begins: its text goes on from no words."""


def make_row(
    prompt: Sequence[int],
    params: SamplingParams,
    coins: Coins,
    vocab_size: int,
    *,
    ended: Ended | None = None,
    longest: int | None = None,
    row_class: type[DecodeState] = DecodeState,
    warp_class: type[Warp] = Warp,
) -> DecodeState:
    """A row ready to be decoded; an audit exchanges the classes to see whether a bug is found."""
    warp = warp_class(params, len(prompt), vocab_size)
    fresh = isinstance(prompt, Turn)
    return row_class(
        list(prompt), len(prompt), params, coins, warp, ended, longest=longest, fresh=fresh
    )


def place_processors(row: DecodeState, device: Any) -> None:
    """Have a row's processors called on the target's device (None: it has none), draft or not."""
    if row.params.processors:
        row.warp.device = device


def rewind(rows: Rows, used: Sequence[int]) -> None:
    """Put coins back to where a step began."""
    for row, count in zip(rows, used, strict=True):
        if isinstance(row.coins, SeededCoins):
            row.coins.rewind(count)
