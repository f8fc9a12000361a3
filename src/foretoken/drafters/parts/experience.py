"""What the drafts of a chain were worth so far: the confidence of their tokens, and going on."""

from __future__ import annotations

from foretoken.trees.worth import Calibration


class Experience:
    """What a draft's confidence was worth, and how often a chain went on where it had stood."""

    FADE = 0.5 ** (1 / 64)

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.hits, self.tries = 3.2, 4.0  # a hopeful start

    @property
    def share(self) -> float:
        """Of tokens whose predecessors stand."""
        return self.hits / self.tries

    def tried(self, stood: int, drafted: int) -> None:
        """A chain of so many tokens, of which the first ones stand."""
        for at in range(min(stood + 1, drafted)):
            self.hits = self.hits * self.FADE + (at < stood)
            self.tries = self.tries * self.FADE + 1.0
