"""Additive masks of a forward, from bits. For one row the cost does not grow with its length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.lm.feed import Feed
from foretoken.trees.masks import outside_window, sight_table, unpack

KEPT_ROWS = 256  # taller masks belong to prefills and are made from nothing


class Masks:
    """Makes masks; keeps a buffer of zeros whose right edge is rewritten for every small feed."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.table = sight_table(dtype, device)
        self.least = torch.finfo(dtype).min
        self.buffer = self.table.new_zeros(0, 0)
        self.dirty = (0, 0)  # rows and columns at the right edge that are not zero

    def full(
        self, feeds: Sequence[Feed], width: int, longest: int, fold: int
    ) -> Float[Tensor, "B 1 foldQ K"]:
        """Who sees whom, windows aside. Shorter feeds repeat their last query up to `width`."""
        if len(feeds) == 1:
            [feed] = feeds
            block = self._block(feed, width)
            if fold * width > KEPT_ROWS:
                mask = block.new_zeros(width, longest)
                mask[:, feed.base :] = block
                return mask.repeat(fold, 1)[None, None]
            return self._edge(block, longest, fold)
        bases = torch.tensor([feed.base for feed in feeds], device=self.table.device)
        columns = torch.arange(longest, device=self.table.device)
        hidden = (columns >= bases[:, None])[:, None, None].expand(-1, -1, width, -1)
        mask = self.table.new_zeros(hidden.shape).masked_fill_(hidden, self.least)
        for row, feed in zip(mask, feeds, strict=True):
            row[0, :, feed.base : feed.stop] = self._block(feed, width)
        return mask.repeat(1, 1, fold, 1) if fold > 1 else mask

    def windowed(
        self,
        mask: Float[Tensor, "B 1 foldQ K"],
        queries: Int[Tensor, "B Q"],
        keys: Int[Tensor, "B K"],
        window: int,
        low: int,
    ) -> Float[Tensor, "B 1 foldQ K_from_low"]:
        """The same mask with keys before each query's window hidden, from column `low` on."""
        hidden = outside_window(queries, keys[:, low:], window)[:, None]
        fold = mask.shape[2] // queries.shape[1]
        if fold > 1:
            hidden = hidden.repeat(1, 1, fold, 1)
        return mask[..., low:].masked_fill(hidden, self.least)

    def _block(self, feed: Feed, width: int) -> Tensor:
        """[width, columns from the feed's base on]."""
        seen = feed.seen
        if len(seen) < width:
            seen = seen + seen[-1:] * (width - len(seen))
        return unpack(seen, feed.stop - feed.base, self.table)

    def _edge(self, block: Tensor, longest: int, fold: int) -> Tensor:
        """A view of the buffer: zeros, then `block` at the right edge, `fold` times over."""
        width, tail = block.shape
        rows = fold * width
        height, breadth = self.buffer.shape
        if rows > height or longest > breadth:
            height, breadth = max(rows, height, 16), max(2 * longest, breadth, 256)
            self.buffer, self.dirty = block.new_zeros(height, breadth), (0, 0)
        edge = breadth - tail
        stale_rows, stale = self.dirty
        if stale > tail:
            self.buffer[:stale_rows, breadth - stale : edge] = 0
        self.dirty = (max(rows, stale_rows), tail)
        view = self.buffer[:rows]
        view.view(fold, width, breadth)[:, :, edge:] = block
        return view[:, breadth - longest :][None, None]


def column_positions(
    feeds: Sequence[Feed], longest: int, device: torch.device
) -> Int[Tensor, "B K"]:
    """The position of the token in every column of every row."""
    columns = torch.arange(longest, device=device).repeat(len(feeds), 1)
    for row, feed in zip(columns, feeds, strict=True):
        row[feed.base : feed.stop] = torch.tensor(feed.key_positions, device=device)
    return columns
