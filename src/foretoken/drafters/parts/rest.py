"""Steps in which a batch is not asked for drafts, because none of the last ones brought any."""

from __future__ import annotations

PATIENCE = 4  # steps without a draft before the first rest; each one more doubles it
LONGEST = 7  # steps of a rest: so many tokens of each row may pass before a copy is noticed


class Rest:
    """For batches of one size.

    Asking costs each row a twentieth of a millisecond, in a large batch together a twentieth of a
    step, and there a node has to be likely before it pays.
    """

    __slots__ = ("fruitless", "left")

    def __init__(self) -> None:
        self.fruitless, self.left = 0, 0

    def due(self) -> bool:
        """Whether this step passes without a draft."""
        self.left -= self.left > 0
        return self.left > 0

    def asked(self, drafted: bool) -> None:
        """What came of a step in which drafts were asked for."""
        self.fruitless = 0 if drafted else self.fruitless + 1
        steps = 2 ** min(self.fruitless - PATIENCE, LONGEST) if self.fruitless >= PATIENCE else 0
        self.left = 1 + min(steps, LONGEST)
