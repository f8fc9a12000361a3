"""Which kernel multiplies the weights of one shape fastest, by the number of rows: measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from time import perf_counter, thread_time
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.lm.kernels.linears import (
    DENSE,
    LISTED,
    NATIVE,
    ONEDNN,
    PACKED,
    PAD,
    PADDED,
    TRANSPOSED,
    can_pack,
)
from foretoken.lm.runtime.slot_attention import IN_ONE_CALL
from foretoken.native.library import Places

# row counts that are measured, the telling ones first, since the time to measure is bounded
ROWS = (1, 16, 64, 4, 32, 8, 2, 256, 24, 3, 12, 6)
MOST = {PADDED: PAD - 1}  # rows that a kernel is meant for; the others have no end
Seconds = Mapping[int, Mapping[int, float]]  # rows -> kernel -> seconds of one call
PLAIN = (DENSE, TRANSPOSED, ONEDNN, NATIVE)  # of any number of rows, on the weight where it lies
COMPILING = 1.5  # oneDNN takes 1 to 5 ms for a new row count, and 0.2 to 1.2 for a prompt's product
SLOWEST, STALL = 1e9, 1e-3  # bytes a second, and seconds: a lone row that takes longer was stalled


class Multiplies(Protocol):
    """A product with a kernel to be chosen: of one layer, or of several that share an input."""

    width: int
    dtype: torch.dtype
    places: Places | None

    def run(self, kernel: int, x: Tensor) -> Any: ...
    def pack_once(self) -> None: ...
    def nbytes(self) -> int: ...


def measure(
    products: Sequence[Multiplies], seconds: float, copies: bool = True
) -> dict[int, dict[int, float]]:
    """Seconds per call of each kernel by row count, over products of one shape.

    Several products are cycled through, since a weight that stays in the cache flatters everybody.
    A kernel that is far behind once is not tried again, but for the best of those without a limit;
    `seconds` bounds the whole, and a row count that was not reached takes its neighbour's choice.
    Where calls wait for a processor that others keep busy, nothing is told of kernels: then C is
    taken where it is meant for, as it waits least (a whole forward in one call). Without `copies`
    none is made, and kernels that need one are not tried.
    """
    members = products[: max(1, 96_000_000 // products[0].nbytes())]
    packs = can_pack(members[0].dtype)
    copied = packs and copies
    for product in members if copied else ():
        product.pack_once()
    alive = [DENSE, TRANSPOSED, *((ONEDNN,) if packs else ())]
    alive += [PACKED, PADDED] if copied else []
    alive += [NATIVE] if members[0].places is not None else []
    table: dict[int, dict[int, float]] = {}
    ends = perf_counter() + seconds
    for rows in ROWS:
        if table and perf_counter() > ends:
            break
        x = torch.linspace(-1, 1, rows * members[0].width, dtype=members[0].dtype)
        x = x.reshape(1, rows, members[0].width)
        used = members if rows < 64 else members[:1]  # many rows: arithmetic, not memory
        tried = [kernel for kernel in alive if rows <= MOST.get(kernel, rows)]
        table[rows] = interleaved(used, x, tried)
        stalled = min(table[rows].values()) > STALL + rows * members[0].nbytes() / SLOWEST
        if stalled and NATIVE in alive:
            many = PACKED if copied else DENSE if packs else NATIVE
            return by_rule(min(table[rows].values()), many)
        # a bad moment must not leave only kernels that are meant for few rows, or want a copy
        told, best = table[rows], min(table[rows].values())
        endless = min((kernel for kernel in told if kernel not in MOST), key=told.__getitem__)
        plain = min((kernel for kernel in told if kernel in PLAIN), key=told.__getitem__)
        alive = [k for k in alive if k in (endless, plain) or told.get(k, best) < 4 * best]
    return dict(sorted(table.items()))


def by_rule(seconds: float, many: int) -> dict[int, dict[int, float]]:
    """A table of which C is chosen for as many rows as one call may take, and `many` above."""
    return {
        1: {DENSE: 2 * seconds, NATIVE: seconds},
        IN_ONE_CALL: {DENSE: 2 * seconds, NATIVE: seconds},
        4 * IN_ONE_CALL: {DENSE: 2 * seconds, many: seconds},
    }


def interleaved(
    members: Sequence[Multiplies], x: Tensor, kernels: Sequence[int]
) -> dict[int, float]:
    """Best of three passes per kernel, taken in turns so that a busy neighbour harms all alike.

    With one thread its own processor time is read, which does not count the neighbour at all.
    """
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    best = dict.fromkeys(kernels, float("inf"))
    for _ in range(3):
        for kernel in kernels:
            began = clock()
            for product in members:
                product.run(kernel, x)
            best[kernel] = min(best[kernel], (clock() - began) / len(members))
    return best


def choose(
    table: Seconds, allowed: Sequence[int], margin: float = 0.03, compiled: Collection[int] = ()
) -> tuple[list[int], int]:
    """The kernel for each row count up to LISTED, and the one for more.

    A row count between two measured ones takes the next larger's choice; an earlier kernel in
    `allowed` is left only for one that is faster by more than `margin`. Those that are `compiled`
    for every row count they meet are so for nearly every prompt.
    """
    measured = sorted(table)

    def fastest(rows: int) -> int:
        seconds = table[next((m for m in measured if m >= rows), measured[-1])]
        if rows > LISTED:
            seconds = {k: s * (COMPILING if k in compiled else 1) for k, s in seconds.items()}
        able = [k for k in allowed if k in seconds and rows <= MOST.get(k, rows)]
        chosen = able[0]
        for kernel in able:
            if seconds[kernel] < seconds[chosen] * (1 - margin):
                chosen = kernel
        return chosen

    return [fastest(rows) for rows in range(LISTED + 1)], fastest(max(LISTED + 1, measured[-1]))
