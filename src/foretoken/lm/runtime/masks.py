"""Additive masks of a forward, from bits. For one row the cost does not grow with its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.errors import CapabilityError
from foretoken.lm.runtime.attention import MOST_FOLDED
from foretoken.lm.runtime.family import Family
from foretoken.lm.runtime.packing import Batch, Feed
from foretoken.lm.runtime.plan import Plan
from foretoken.trees.masks import Sight, outside_window


class Masks:
    """Makes masks; keeps a buffer of zeros whose right edge is rewritten for every small feed."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.sight = Sight(dtype, device)
        # where the mask is not looked at
        self.nothing = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
        self.least = torch.finfo(dtype).min
        self.buffer = self.nothing.new_zeros(0, 0)
        self.dirty = (0, 0)  # rows and columns at the right edge that are not zero

    def full(
        self, feeds: Sequence[Feed], width: int, longest: int, fold: int
    ) -> Float[Tensor, "B 1 foldQ K"]:
        """Who sees whom, windows aside. Shorter feeds repeat their last query up to `width`."""
        if len(feeds) == 1:
            [feed] = feeds
            block = self.behind(feed, width)
            if fold * width > MOST_FOLDED:
                mask = block.new_zeros(width, longest)
                mask[:, feed.base :] = block
                return mask.repeat(fold, 1)[None, None]
            return self._edge(block, longest, fold)
        device = self.nothing.device
        bases = torch.tensor([feed.base for feed in feeds], device=device)
        columns = torch.arange(longest, device=device)
        hidden = (columns >= bases[:, None])[:, None, None].expand(-1, -1, width, -1)
        mask = self.nothing.new_zeros(hidden.shape).masked_fill_(hidden, self.least)
        for row, feed in zip(mask, feeds, strict=True):
            row[0, :, feed.base : feed.stop] = self.behind(feed, width)
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

    def behind(self, feed: Feed, width: int) -> Float[Tensor, "width K"]:
        """Who sees whom of the columns from the feed's base on; all before are seen by all."""
        seen = feed.seen
        if len(seen) < width:
            seen = seen + seen[-1:] * (width - len(seen))
        return self.sight.unpack(seen, feed.stop - feed.base)

    def _edge(self, block: Tensor, longest: int, fold: int) -> Tensor:
        """A view of the buffer: zeros, then `block` at the right edge, `fold` times over."""
        width, tail = block.shape
        rows = fold * width
        if not block.is_cpu:
            return at_the_edge(block, longest, fold)
        height, breadth = self.buffer.shape
        if rows > height or longest > breadth:
            height, breadth = max(rows, height, 16), max(2 * longest, breadth, 256)
            self.buffer, self.dirty = block.new_zeros(height, breadth), (0, 0)
        stale_rows, stale = self.dirty
        if stale > tail:
            self.buffer[:stale_rows, breadth - stale : breadth - tail] = 0
        self.dirty = (max(rows, stale_rows), tail)
        # One strided view each, where slices would take three operations.
        steps = (width * breadth, breadth, 1)
        self.buffer.as_strided((fold, width, tail), steps, breadth - tail).copy_(block)
        shape, apart = (1, 1, rows, longest), (0, 0, breadth, 1)
        return self.buffer.as_strided(shape, apart, breadth - longest)

    def sights(self, batch: Batch, family: Family, plan: Plan) -> Sights:
        """What the queries of a batch see, by window."""
        feeds, width = batch.feeds, batch.width
        bounds = window_bounds(feeds, family.windows)
        if bounds and plan.ordered:
            bounds = dict.fromkeys(bounds, 0)
        lone = len(feeds) == 1 and plan.own and plan.told
        first = feeds[0]
        masks: dict[int | None, Tensor] = dict.fromkeys(family.windows, self.nothing)
        if lone and width == 1 and first.in_order:
            return Sights(masks, bounds, unmasked=True)  # a single query that sees all columns read
        if lone and first.stop == width and not first.scored and not bounds:
            return Sights(masks, bounds, causal=True)  # a prompt's first chunk
        fold = family.fold if plan.own and family.fold * width <= MOST_FOLDED else 1
        full = self.full(feeds, width, batch.longest, fold)
        prefix = min(feed.base for feed in feeds) if plan.own else 0
        keys = batch.key_positions() if bounds else None
        for window in masks:
            masks[window] = full
            if keys is not None and window is not None and window in bounds:
                low = bounds[window]
                masks[window] = self.windowed(full, batch.positions, keys, window, low)
        return Sights(masks, bounds, prefix=prefix)

    def places(self, batch: Batch, family: Family, plan: Plan) -> Int[Tensor, "1 K"]:
        """For models that count places: one row, every column a token, the mask their own."""
        [feed] = batch.feeds
        if not feed.in_order:
            raise CapabilityError(
                f"a tree was handed to {family.name}.",
                f"this model scores chains only: {plan.why}.",
                "use method chain, prompt-lookup or plain.",
            )
        return torch.ones(1, batch.longest, dtype=torch.long, device=self.nothing.device)


def at_the_edge(block: Float[Tensor, "Q K"], longest: int, fold: int) -> Tensor:
    """Zeros, then `block` at the right edge, `fold` times over, in memory of its own: kernels of a
    GPU read masks from aligned addresses, which a view of a larger buffer need not have.
    """
    width, tail = block.shape
    mask = block.new_zeros(fold, width, longest)
    mask[..., longest - tail :] = block
    return mask.view(1, 1, fold * width, longest)


@dataclass(frozen=True, slots=True)
class Sights:
    """What the queries of one forward see: a mask per window of the model's layers."""

    masks: dict[int | None, Tensor]
    bounds: dict[int | None, int]  # windows that hide anything: the first column still seen
    unmasked: bool = False  # every query sees every column, masks are not looked at
    causal: bool = False  # queries and columns are the same tokens, in order
    prefix: int = 0  # first columns that every query of every row sees, windows aside

    def prefix_of(self, window: int | None) -> int:
        """First columns that all queries see in layers of this window."""
        return 0 if window in self.bounds else self.prefix

    def arguments(self, family: Family) -> dict[str, Any]:
        """The same as arguments of a transformers model."""
        mask: Any = self.masks[family.windows[0]]
        if family.names:
            mask = {name: self.masks[window] for name, window in family.names.items()}
        # one number for all layers: of no use where a window hides columns from some of them
        prefix = 0 if self.bounds else self.prefix
        said = {"unmasked": self.unmasked, "causal": self.causal, "prefix": prefix}
        return {"attention_mask": mask} | {name: value for name, value in said.items() if value}

    def kept(self) -> Sights:
        """The same in memory of its own: a mask lies in a buffer that the next one is made in."""
        return replace(self, masks={window: mask.clone() for window, mask in self.masks.items()})

    def lows(self, family: Family) -> dict[int, int]:
        """The first column that each windowed layer reads."""
        if not self.bounds:
            return {}
        return {i: self.bounds[w] for i, w in enumerate(family.windows) if w in self.bounds}


def window_bounds(feeds: Sequence[Feed], windows: Sequence[int | None]) -> dict[int | None, int]:
    """For each window that hides anything: the first column that some query still sees."""
    if not any(windows):
        return {}
    top = max(max(feed.positions) for feed in feeds)
    lowest = min(min(feed.positions) for feed in feeds)
    return {
        window: max(0, lowest - window + 1)
        for window in set(windows)
        if window is not None and top >= window
    }
