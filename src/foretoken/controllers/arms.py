"""Which of a drafter's own drafters drafts: the fastest so far; the others are tried now and then.

Speeds are tokens in the time of a plain step (`Bargain`), so arms of different cost compare. Only
past steps decide, so the law of the text stays what each arm's own rule makes it.
"""

from __future__ import annotations

from foretoken.controllers.shapes import Bargain

ENOUGH = 8  # steps of an arm before its speed counts
FIRST, MOST = 16, 128  # steps between trials of a slower arm, doubled while it stays slower


class Arms:
    """One bargain per arm."""

    def __init__(self, bargains: list[Bargain]) -> None:
        self.bargains = bargains
        self.waited = [0] * len(bargains)
        self.every = [FIRST] * len(bargains)
        self.turn = 0  # arm of the next probe while nothing is drafted

    def __getitem__(self, arm: int) -> Bargain:
        return self.bargains[arm]

    def pick(self) -> tuple[int, bool]:
        """The arm of this step, and whether this is a trial: of a new arm as long as it promises
        anything, or of a slower one that has waited long enough.
        """
        arms = range(len(self.bargains))
        youngest = min(arms, key=lambda arm: self.bargains[arm].steps)
        if self.bargains[youngest].steps < ENOUGH and self.bargains[youngest].speed >= 1.0:
            return youngest, True
        best = max(arms, key=lambda arm: self.bargains[arm].speed)
        self.waited[best], self.every[best] = 0, FIRST
        for arm in arms:
            if arm != best:
                self.waited[arm] += 1
                if self.waited[arm] >= self.every[arm]:
                    self.waited[arm] = 0
                    self.every[arm] = min(2 * self.every[arm], MOST)
                    return arm, True
        return best, False

    def next_probe(self) -> int:
        """Arms are probed in turn."""
        self.turn = (self.turn + 1) % len(self.bargains)
        return self.turn

    def scale(self, factor: float) -> None:
        """Believe what was seen so far `factor` times as much."""
        for bargain in self.bargains:
            bargain.scale(factor)
