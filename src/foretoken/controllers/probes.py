"""When a row that decodes plainly tries a draft: a bandit's exploration, bounded in cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Probes:
    """Bursts of short drafts that go on while they pay, ever rarer if they do not."""

    FLOOR = 8  # intervals until a probe while drafting is forbidden

    RAREST = 4  # intervals between probes of a lone row that never pay

    def __init__(self, every: int) -> None:
        self.every = self.interval = every
        self.rarest = self.RAREST  # the same for the rows there are
        self.waited = 0
        self.depth = 2
        self.won = False  # a draft of this burst has paid
        self.row: int | None = None  # uid of the row whose burst goes on

    def due(self, idle: Mapping[int, int], broke: bool, idled: Callable[[int], int]) -> int | None:
        """Where the row that probes now is; None for nobody.

        `idle`: where each row that does not draft is, by uid; `idled`: for how long it has not.
        """
        if not idle:  # every row drafts by itself
            self.waited, self.interval, self.row = 0, self.every, None
            return None
        self.waited += 1
        if self.row is not None and self.row in idle:
            return idle[self.row]
        self.row = None
        if self.waited < self.threshold(broke):
            return None
        self.waited, self.depth, self.won = 0, 2, False
        self.row = max(idle, key=lambda uid: idled(idle[uid]))  # a new burst
        return idle[self.row]

    def threshold(self, broke: bool) -> int:
        """Plain steps before a probe."""
        return self.FLOOR * self.every if broke else self.interval

    def ended(self, paid: bool, whole: bool) -> None:
        """A probe came back: did its tokens pay for it, and were all of them accepted?"""
        if paid:
            self.won = True
            if whole:
                self.depth = min(2 * self.depth, 8)
            return
        rarer = min(2 * self.interval, self.rarest * self.every)
        self.interval = self.every if self.won else rarer
        self.waited, self.row = 0, None
