"""The same budget every step: the rule of the first papers, and the yardstick of the others."""

from __future__ import annotations

from foretoken.controllers.steady import Size, Steady


class Fixed(Steady):
    """`depth` tokens deep, at most `nodes` nodes."""

    Config = Size

    def __init__(self, config: Size | None = None) -> None:
        self.config = config or Size()
        self.budget = self.config.budget
