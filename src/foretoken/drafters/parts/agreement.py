"""What a node is worth that a draft model, a look-up or both propose, and when to ask the model.

Two guesses of one token are not independent, and no formula says how far they are not. So the
chance of a node is learned for classes of what both sides say of it, and so is what a draft model's
tree adds to what look-ups already promise.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

EDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)  # of chances told apart
HALF = 0.5  # chance that look-ups give to other children, from which on these are told apart
WEIGHT = 6.0  # children whose promise is taken at its word at first
FADE = 0.5 ** (1 / 1024)  # per child of a class

MODEL = len(EDGES) + 3  # unasked, asked and silent, or a chance
LOOK_UP = len(EDGES) + 4  # silent, another child, surely another child, or a chance


class Agreement:
    """Accepted over promised, by what the draft model and the look-ups say of a child."""

    def __init__(self) -> None:
        self.hits = [0.0] * (2 * MODEL * LOOK_UP)
        self.promised = [0.0] * len(self.hits)

    @staticmethod
    def place(
        greedy: bool, model: float | None, asked: bool, look_up: float | None, others: float
    ) -> int:
        """The class of a child: the chances that either side gives it (None: not proposed),
        whether the model was asked here, and what look-ups give to its siblings.
        """
        first = int(asked) if model is None else 2 + bisect(EDGES, model)
        if look_up is not None:
            second = 3 + bisect(EDGES, look_up)
        else:
            second = (others > 0.0) + (others >= HALF)
        return (greedy * MODEL + first) * LOOK_UP + second

    def chance(self, place: int, promise: float) -> float:
        """Of a child of this class that is promised so much, given that its parent is right."""
        word = WEIGHT * promise
        return min(promise * (self.hits[place] + word) / (self.promised[place] + word), 1.0)

    def tried(self, place: int, promise: float, hit: bool) -> None:
        """A child whose parent was right, and whether it was the one."""
        self.hits[place] = self.hits[place] * FADE + hit
        self.promised[place] = self.promised[place] * FADE + promise


class Gain:
    """What a model's tree adds to look-ups, in expected tokens above its price, by what these
    promise: for the first token, and altogether. A class that gains nothing is tried now and then.
    """

    FIRST = (0.3, 0.6, 0.8, 0.9, 0.96)  # chance that look-ups have the next token
    ALL = (1.0, 2.0, 4.0, 8.0)  # tokens that they promise
    HOPE = 1.0  # tokens that a class is assumed to have gained in one tree before it was tried
    FADE = 0.5 ** (1 / 64)
    EVERY = 24  # steps between trials of a class that gains nothing
    RARER = 8  # times as many where a model would first have to read the text

    def __init__(self) -> None:
        size = (len(self.FIRST) + 1) * (len(self.ALL) + 1)
        self.gained = [self.HOPE] * size
        self.trees = [1.0] * size
        self.waited = [0] * size

    def place(self, chances: Sequence[float], parents: Sequence[int]) -> int:
        """The class of a look-up's tree."""
        first = sum(
            chance for chance, above in zip(chances[1:], parents[1:], strict=True) if above == 0
        )
        return bisect(self.FIRST, first) * (len(self.ALL) + 1) + bisect(self.ALL, sum(chances[1:]))

    def promising(self, place: int, rows: int = 1, reading: float = 0.0) -> bool:
        """Whether a model's tree is likely to pay, or due to be tried.

        `rows`: that ask in a step; `reading`: expected tokens that reading the text would cost,
        spread over the steps that are left.
        """
        if self.gained[place] > reading * self.trees[place]:
            return True
        self.waited[place] += 1
        return self.waited[place] % (self.EVERY * rows * (self.RARER if reading else 1)) == 0

    def update(self, place: int, gain: float) -> None:
        """A tree was grown, and raised what the draft is worth by so much."""
        self.gained[place] = self.gained[place] * self.FADE + gain
        self.trees[place] = self.trees[place] * self.FADE + 1.0
