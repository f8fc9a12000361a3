"""Who sees whom in a tree, and additive masks made from that.

Sight is kept as one python integer per node: bit j says that column j is visible. A tree has some
dozens of nodes, so this costs microseconds, and a table of all bytes turns bits into numbers.
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


class Sight:
    """Turns bits into additive masks: 0 where a bit is set, the smallest number elsewhere.

    Additive and finite: a boolean mask is silently wrong with eager attention, and -inf turns a
    query that sees nothing into NaN. The numbers of each byte are kept as bytes themselves, so that
    a mask is joined and read as it lies: tensor operations between two forwards come in cold.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
        numbers = torch.zeros(256, 8, dtype=dtype).masked_fill_(bits == 0, torch.finfo(dtype).min)
        self.words = [row.tobytes() for row in numbers.view(torch.uint8).numpy()]

    def unpack(self, seen: Sequence[int], columns: int) -> Float[Tensor, "n columns"]:
        """One row per entry of `seen`."""
        width, words = (columns + 7) // 8, self.words
        raw = bytearray().join(
            [words[byte] for bits in seen for byte in bits.to_bytes(width, "little")]
        )
        mask = torch.frombuffer(raw, dtype=self.dtype)
        mask = mask.as_strided((len(seen), columns), (8 * width, 1))
        return mask if self.device.type == "cpu" else mask.to(self.device)


def outside_window(queries: Int[Tensor, "B Q"], keys: Int[Tensor, "B K"], window: int) -> Tensor:
    """[B, Q, K], true where a key lies before a query's window. Positions decide, not columns."""
    return keys[:, None, :] <= (queries - window)[:, :, None]
