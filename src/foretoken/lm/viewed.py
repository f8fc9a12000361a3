"""What views of a CachedLM start from: its layers, and the ways to run some of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from foretoken.lm.exits import CachedExits
from foretoken.lm.family import Family
from foretoken.lm.leaving import CachedLeaves
from foretoken.lm.skips import CachedSkips
from foretoken.lm.stages import Stack

if TYPE_CHECKING:
    from foretoken.lm.cached import CachedLM


class Viewed:
    """Base of CachedLM; see `lm.views` for what the views offer."""

    family: Family
    model: Any
    _layers: list[nn.Module]

    @property
    def layers(self) -> int:
        return self.family.layers

    @cached_property
    def stack(self) -> Stack:
        """The decoder layers, some of which a forward may leave out."""
        return Stack(self.model, self._layers)

    def exits(self, marks: Sequence[int], look_back: int | None = None) -> CachedExits:
        """Drafting by the first layers."""
        return CachedExits(cast("CachedLM", self), marks, look_back)

    def skips(self) -> CachedSkips:
        """Drafting without some sublayers."""
        return CachedSkips(cast("CachedLM", self))

    def leaves(self) -> CachedLeaves:
        """Scoring that ends early."""
        return CachedLeaves(cast("CachedLM", self))
