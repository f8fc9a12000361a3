"""Growers that let a model grow trees in one call, where it can and nobody looks on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from foretoken.contract import StoppingRule
from foretoken.drafters.growers.grower import Grower
from foretoken.trees.growing import Grown, GrowsTrees, GrowthRule, grows_trees
from foretoken.types import DecodeState


class RuledGrowth(Protocol):
    """A `Growth` that may follow a rule."""

    row: DecodeState
    complete: bool

    def rule(self) -> GrowthRule | None:
        """What decides how it grows; None where more than numbers does."""
        ...

    def adopt(self, grown: Grown) -> None:
        """Take over what a model has grown."""
        ...


class AtOnce(Grower):
    """Base of growers whose `begin` makes a `RuledGrowth`."""

    def grow(self, growths: Sequence[Any], stop: StoppingRule | None) -> None:
        if growths and stop is None and grows_trees(self.model):
            self.grow_at_once(self.model, growths)
            growths = [one for one in growths if not one.complete]
        super().grow(growths, stop)

    def grow_at_once(self, model: GrowsTrees, growths: Sequence[RuledGrowth]) -> None:
        """What has a rule, as far as the model grows it."""
        asked = [(one, rule) for one in growths if (rule := one.rule()) is not None]
        if not asked:
            return
        found = model.grow_trees([one.row for one, _ in asked], [rule for _, rule in asked])
        for (one, _), grown in zip(asked, found, strict=True):
            if grown is not None:
                one.adopt(grown)
                one.complete = grown.whole
