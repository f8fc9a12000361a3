"""Who sees whom in a tree, and additive masks made from that.

Sight is kept as one python integer per node: bit j says that column j is visible. A tree has some
dozens of nodes, so this costs microseconds, and a table of 256 bytes turns bits into numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def ancestors(parents: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """Bits of the nodes that each node sees: its ancestors and itself.

    `known` are the bits of nodes that are there already; `parents` are those of the nodes after
    them. A parent of -1 starts at the root.
    """
    seen = list(known)
    for parent in parents:
        above = seen[parent] if parent >= 0 else 0
        seen.append(above | 1 << len(seen))
    return seen[len(known) :]


def depths(parents: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """Distance of each node from the root; arguments as in `ancestors`."""
    down = list(known)
    for parent in parents:
        down.append(down[parent] + 1 if parent >= 0 else 0)
    return down[len(known) :]


def prefixes(count: int) -> list[int]:
    """Bits of a chain: token i sees columns 0 to i."""
    return [(2 << i) - 1 for i in range(count)]


def sight_table(dtype: torch.dtype, device: torch.device) -> Float[Tensor, "256 8"]:
    """For every byte its eight mask values: 0 where the bit is set, the smallest number elsewhere.

    Additive and finite: a boolean mask is silently wrong with eager attention, and -inf turns a
    query that sees nothing into NaN.
    """
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    table = torch.zeros(256, 8, dtype=dtype, device=device)
    return table.masked_fill_(bits == 0, torch.finfo(dtype).min)


def unpack(
    seen: Sequence[int], columns: int, table: Float[Tensor, "256 8"]
) -> Float[Tensor, "n columns"]:
    """Additive mask from bits, one row per entry of `seen`."""
    width = (columns + 7) // 8
    raw = bytearray(b"".join([bits.to_bytes(width, "little") for bits in seen]))
    packed = torch.frombuffer(raw, dtype=torch.uint8).to(table.device)
    return table[packed.int()].view(len(seen), 8 * width)[:, :columns]


def outside_window(queries: Int[Tensor, "B Q"], keys: Int[Tensor, "B K"], window: int) -> Tensor:
    """[B, Q, K], true where a key lies before a query's window. Positions decide, not columns."""
    return keys[:, None, :] <= (queries - window)[:, :, None]
