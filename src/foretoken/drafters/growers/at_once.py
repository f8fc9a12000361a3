"""Growers that let a model grow a lone row's tree in one call, where it can and nobody looks on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from foretoken.contract import StoppingRule
from foretoken.drafters.growers.grower import Grower
from foretoken.trees.growing import Grown, GrowsTrees, GrowthRule
from foretoken.types import DecodeState


class RuledGrowth(Protocol):
    """A `Growth` that may follow a rule."""

    row: DecodeState

    def rule(self) -> GrowthRule | None:
        """What decides how it grows; None where more than numbers does."""
        ...

    def adopt(self, grown: Grown) -> None:
        """Take over what a model has grown."""
        ...


class AtOnce(Grower):
    """Base of growers whose `begin` makes a `RuledGrowth`."""

    def grow(self, growths: Sequence[Any], stop: StoppingRule | None) -> None:
        model = self.model
        if len(growths) == 1 and stop is None and isinstance(model, GrowsTrees):
            one: RuledGrowth = growths[0]
            rule = one.rule()
            grown = None if rule is None else model.grow_tree(one.row, rule)
            if grown is not None:
                one.adopt(grown)
                if grown.whole:
                    return
        super().grow(growths, stop)
