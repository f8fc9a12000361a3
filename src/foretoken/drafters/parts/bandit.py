"""A bandit over drafters that take time: which of them drafts the next step, if any.

Each is judged by its pace, the tokens and plain steps that its last steps brought and took, in this
text first of all; a slower one is tried now and then. Only past steps decide, so the law of the
text stays what each drafter's own rule makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from foretoken.trees.counts import Pace

HALF_LIFE = 32.0  # of paces, in steps
ENOUGH = 8  # steps of an arm before its pace counts
FIRST, MOST = 16, 128  # steps between trials of a slower arm, doubled while it stays slower
HOPE, TRIALS = 1.5, 2.0  # speed-up assumed at first, and the steps that this is worth
PRIOR = 4.0  # steps in a text that the pace in all texts counts as
PAUSE = 8.0  # plain steps that a step counts as at most: a longer one was disturbed


def paces(arms: int) -> list[Pace]:
    """Of every arm, before anything was seen."""
    return [Pace(HALF_LIFE) for _ in range(arms)]


class Bandit:
    """The paces of all arms, whatever the text, and when each was tried."""

    def __init__(self, arms: int) -> None:
        self.all = paces(arms)
        self.tried = [0] * arms
        self.waited = [0] * arms
        self.every = [FIRST] * arms

    def choose(self, texts: Sequence[Sequence[Pace]], speed: float) -> tuple[int | None, float]:
        """The arm for rows with these paces, and what it promises each of them above a plain step;
        infinitely much where it is to be tried. No arm is chosen that promises nothing.
        """
        due = self.due()
        if due is not None:
            return due, inf
        gains = [self.gain(arm, texts, speed) + speed - 1.0 for arm in range(len(self.all))]
        best = max(gains, default=0.0)
        return (gains.index(best), best) if best > 0.0 else (None, 0.0)

    def gain(self, arm: int, texts: Sequence[Sequence[Pace]], speed: float) -> float:
        """What a step of an arm brings a row of these texts above its time's worth."""
        whole = self.all[arm]
        prior = PRIOR * whole.gain(speed) / max(whole.steps, 1.0)
        found = [(text[arm].gain(speed) + prior) / (text[arm].steps + PRIOR) for text in texts]
        return sum(found) / len(found)

    def due(self) -> int | None:
        """An arm to be tried: a new one as long as it promises anything, or one that has waited
        long enough.
        """
        for arm, pace in enumerate(self.all):
            promising = pace.tokens + TRIALS * HOPE >= pace.spent + TRIALS
            if self.tried[arm] < ENOUGH and promising:
                return arm
            if self.waited[arm] >= self.every[arm]:
                self.waited[arm] = 0
                self.every[arm] = min(2 * self.every[arm], MOST)
                return arm
        return None

    def update(
        self,
        arm: int | None,
        texts: Sequence[Sequence[Pace]],
        emitted: Sequence[int],
        spent: float,
        forced: bool = False,
    ) -> None:
        """A step brought each row so many tokens in the time of `spent` plain steps; None: no arm
        drafted. One that was forced says nothing of how long the next trial may wait.
        """
        self.waited = [waited + 1 for waited in self.waited]
        if arm is None:
            return
        spent = min(spent, PAUSE)
        self.all[arm].update(sum(emitted) / len(emitted), spent)
        for text, own in zip(texts, emitted, strict=True):
            text[arm].update(own, spent)
        self.tried[arm] += 1
        self.waited[arm] = 0
        if not forced:
            self.every[arm] = FIRST
