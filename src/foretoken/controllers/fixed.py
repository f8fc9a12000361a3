"""The same budget every step: the rule of the first papers, and the yardstick of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.controllers.steady import Steady
from foretoken.errors import ConfigError
from foretoken.types import (
    Budget,
    DecodeState,
    endless,
)


class Fixed(Steady):
    """`depth` tokens deep, at most `nodes` nodes."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        # A drafter with a shape of its own, such as mcsd's, brings its size where nothing is said.
        depth: int = 5  # drafted tokens on the longest path
        nodes: int | None = None  # drafted nodes of a tree; None: `depth`, a chain's worth

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        depth, nodes = self.config.depth, self.config.nodes
        for name, value in (("depth", depth), ("nodes", nodes)):
            if value is not None and value < 0:
                raise ConfigError(
                    f"{name}={value} was asked for.",
                    f"{name} is 0 (no drafting) or more.",
                    f"pass {name}=0 or more.",
                )
        self.budget = Budget(depth, depth if nodes is None else nodes)

    def budgets(self, rows: Sequence[DecodeState]) -> list[Budget]:
        return [self.budget] * len(rows)

    @endless
    def keep_going(self, row: DecodeState, law: Tensor, hidden: Tensor | None = None) -> bool:
        return True
