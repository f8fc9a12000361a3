"""A bandit over drafters that take time: which of them drafts the next step, if any.

Each is judged by its pace, the tokens and plain steps that its last steps brought and took, in this
text first of all; a slower one is tried now and then, as often as a small share of all time pays
for. Only past steps decide, so the law of the text stays what each drafter's own rule makes it.
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
EXPLORED = 0.01  # share of time that trials may lose
PURSE = 4.0  # plain steps that the first trials may lose, and the most that is saved up
GUESS = 0.5  # plain steps that a trial of a new arm is expected to lose
RESTS = 8  # steps in which an arm that would not draft is not asked again
PAUSE = 8.0  # plain steps that a step counts as at most: one so long was disturbed, or the arm is
# as slow as that, which its next step tells


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
        self.resting = [0] * arms  # steps left
        self.paused = [False] * arms  # whether the last step was as long as a pause
        self.arms = set(range(arms))  # that may be chosen at all
        self.purse = PURSE

    def choose(self, texts: Sequence[Sequence[Pace]], speed: float) -> tuple[int | None, float]:
        """The arm for rows with these paces, and what it promises each of them above a plain step;
        infinitely much where it is to be tried. No arm is chosen that promises nothing.
        """
        due = self.due(speed)
        if due is not None:
            return due, inf
        gains = {arm: self.gain(arm, texts, speed) + speed - 1.0 for arm in self.awake()}
        arm = max(gains, key=gains.__getitem__, default=None)
        return (arm, gains[arm]) if arm is not None and gains[arm] > 0.0 else (None, 0.0)

    def awake(self) -> list[int]:
        """The arms that may be asked in this step."""
        return [arm for arm in sorted(self.arms) if not self.resting[arm]]

    def gain(self, arm: int, texts: Sequence[Sequence[Pace]], speed: float) -> float:
        """What a step of an arm brings a row of these texts above its time's worth."""
        whole = self.all[arm]
        prior = PRIOR * whole.gain(speed) / max(whole.steps, 1.0)
        found = [(text[arm].gain(speed) + prior) / (text[arm].steps + PRIOR) for text in texts]
        return sum(found) / len(found)

    def due(self, speed: float) -> int | None:
        """An arm to be tried: a new one as long as it promises anything, or one that has waited
        long enough; none while trials have lost as much as they may.
        """
        for arm in self.awake():
            pace = self.all[arm]
            lost = -pace.gain(speed) / pace.steps if pace.steps else GUESS
            if min(lost, PURSE) > self.purse:
                continue
            promising = pace.tokens + TRIALS * HOPE >= pace.spent + TRIALS
            if self.tried[arm] < ENOUGH and promising:
                return arm
            if self.waited[arm] >= self.every[arm]:
                self.put_off(arm)
                return arm
        return None

    def put_off(self, arm: int) -> None:
        """The next trial of an arm waits twice as long."""
        self.waited[arm] = 0
        self.every[arm] = min(2 * self.every[arm], MOST)

    def declined(self, arm: int) -> None:
        """An arm would not draft where it was asked to: nor will it in the next steps."""
        self.resting[arm] = RESTS
        if self.tried[arm] < ENOUGH:
            self.tried[arm] += 1
        self.put_off(arm)

    def update(
        self,
        arm: int | None,
        texts: Sequence[Sequence[Pace]],
        emitted: Sequence[int],
        spent: float,
        forced: bool = False,
        speed: float = 1.0,
    ) -> None:
        """A step brought each row so many tokens in the time of `spent` plain steps; None: no arm
        drafted. One that was forced says nothing of how long the next trial may wait.
        """
        self.waited = [waited + 1 for waited in self.waited]
        self.resting = [max(left - 1, 0) for left in self.resting]
        spent = min(spent, PAUSE)
        self.purse = min(self.purse + EXPLORED * spent, PURSE)
        if arm is None:
            return
        surprising = spent >= PAUSE and not self.paused[arm]
        self.paused[arm] = spent >= PAUSE
        if surprising:
            return  # a pause of the machine is nobody's loss
        if forced:
            self.purse += min(sum(emitted) / len(emitted) - speed * spent, 0.0)
        self.all[arm].update(sum(emitted) / len(emitted), spent)
        for text, own in zip(texts, emitted, strict=True):
            text[arm].update(own, spent)
        self.tried[arm] += 1
        self.waited[arm] = 0
        if not forced:
            self.every[arm] = FIRST
