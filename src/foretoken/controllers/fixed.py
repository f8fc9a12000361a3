"""The same budget every step: the rule of the first papers, and the yardstick of the others."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.controllers.steady import Steady
from foretoken.errors import check_values
from foretoken.types import Budget


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
        check_values(
            self.config,
            ("depth", depth >= 0, "0 (no drafting) or more"),
            ("nodes", nodes is None or nodes >= 0, "0 (no drafting) or more"),
        )
        self.budget = Budget(depth, depth if nodes is None else nodes)
