"""Which of a drafter's own drafters drafts.

Arm 0 makes fixed candidates and knows what each draft is worth, so it is judged draft by draft: it
gets a bar to clear (`Budget.bar`). The others are judged by their pace, the tokens and plain steps
that their last steps brought and took, in this text first of all; a slower one is tried now and
then. Only past steps decide, so the law of the text stays what each arm's own rule makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from foretoken.controllers.prices import Prices
from foretoken.controllers.shapes import NONE, Bargain, Pace
from foretoken.types import Budget

ENOUGH = 8  # steps of an arm before its pace counts
FIRST, MOST = 16, 128  # steps between trials of a slower arm, doubled while it stays slower
PRIOR = 4.0  # steps in a text that the pace in all texts counts as


class Text:
    """The paces in one text: of all steps that drafted, and of each arm."""

    __slots__ = ("arms", "whole")

    def __init__(self, arms: int, half_life: float) -> None:
        self.whole = Pace(half_life)
        self.arms = [Pace(half_life) for _ in range(arms)]

    def scale(self, factor: float) -> None:
        for pace in (self.whole, *self.arms):
            pace.scale(factor)


class Arms:
    """The bargain of all arms together, and the pace of each."""

    def __init__(
        self, bargain: Bargain, count: int, half_life: float, sparing: bool = False
    ) -> None:
        self.bargain, self.half_life, self.sparing = bargain, half_life, sparing
        self.all = Text(count, half_life)  # whatever the text
        self.tried = [0] * count
        self.waited = [0] * count
        self.every = [FIRST] * count
        self.turn = 0  # arm of the next probe while nothing is drafted
        self.forced = False  # the step under way tries an arm, whatever a look-up is worth

    def text(self) -> Text:
        """For a new row."""
        return Text(len(self.tried), self.half_life)

    def budget(self, texts: Sequence[Text], prices: Prices) -> Budget:
        """What every row may draft in this step, and by which arm."""
        rows, count = len(texts), len(self.tried)
        speed = self.speed(texts)
        due = self.due() if count > 1 else None
        self.forced = due is not None
        doubtful = speed < self.bargain.margin and not self.sparing
        speed = max(speed, 1.0)  # plain decoding's, at worst: it is always there to be had
        if due is not None:
            return replace(self.bargain.offer(prices, rows, speed), arm=due, bar=inf)
        if doubtful:
            return NONE
        # Above a step that drafts nothing, which is what arm 0 makes of a step at the worst.
        gains = [0.0, *(self.gain(arm, texts, speed) + speed - 1.0 for arm in range(1, count))]
        best = max(range(count), key=gains.__getitem__)
        return replace(self.bargain.offer(prices, rows, speed), arm=best, bar=gains[best])

    def speed(self, texts: Sequence[Text]) -> float:
        """Tokens per row in the time of a plain step that drafting reaches in these texts."""
        tokens = PRIOR * self.bargain.speed * len(texts) + sum(text.whole.tokens for text in texts)
        return tokens / (PRIOR * len(texts) + sum(text.whole.spent for text in texts))

    def gain(self, arm: int, texts: Sequence[Text], speed: float) -> float:
        """What a step of an arm brings a row of these texts above its time's worth."""
        whole = self.all.arms[arm]
        prior = PRIOR * whole.gain(speed) / max(whole.steps, 1.0)
        found = [
            (text.arms[arm].gain(speed) + prior) / (text.arms[arm].steps + PRIOR) for text in texts
        ]
        return sum(found) / len(found)

    def due(self) -> int | None:
        """An arm to be tried: a new one as long as it promises anything, or one that has waited
        long enough.
        """
        for arm in range(1, len(self.tried)):
            pace, hoped = self.all.arms[arm], Bargain.TRIALS
            promising = pace.tokens + hoped * Bargain.HOPE >= pace.spent + hoped
            if self.tried[arm] < ENOUGH and promising:
                return arm
            if self.waited[arm] >= self.every[arm]:
                self.waited[arm] = 0
                self.every[arm] = min(2 * self.every[arm], MOST)
                return arm
        return None

    def update(self, arm: int, texts: Sequence[Text], emitted: Sequence[int], spent: float) -> None:
        """A step of an arm brought each row so many tokens in the time of `spent` plain steps.

        One that was forced tells of the arm, and nothing of the speed that choosing reaches.
        """
        tokens = sum(emitted) / len(emitted)
        self.all.arms[arm].update(tokens, spent)
        for text, own in zip(texts, emitted, strict=True):
            text.arms[arm].update(own, spent)
        self.tried[arm] += 1
        for other in range(1, len(self.tried)):
            self.waited[other] += 1
        self.waited[arm] = 0
        if self.forced:
            return
        self.every[arm] = FIRST
        self.bargain.pace.update(tokens, spent)
        for text, own in zip(texts, emitted, strict=True):
            text.whole.update(own, spent)

    def scale(self, factor: float, text: Text) -> None:
        """Believe what was seen so far, and in this text, `factor` times as much."""
        for one in (self.bargain.pace, self.all, text):
            one.scale(factor)

    def next_probe(self) -> int:
        """Arms are probed in turn."""
        self.turn = (self.turn + 1) % len(self.tried)
        return self.turn
