"""How much likelier than promised a guess is for the token it is, the one before it and its text.

A copy of a word comes true where a copy of a digit does not, however long the match behind both.
Three numbers shift the log-odds that a guess was promised: one of its token, one of the token
before it, one of the text. They are learned from outcomes by logistic regression, those of tokens
with AdaGrad's rates (Duchi et al. 2011): what was seen often moves less.
"""

from __future__ import annotations

import math
from array import array

KINDS = 1 << 13  # tokens told apart; those with the same last bits share their numbers
LIKELY = 0.5  # least promise of likely guesses, told apart from doubtful ones

LEAST, MOST = 0.002, 0.99  # promises beyond are taken for these
TOKEN_RATE, BEFORE_RATE = 0.4, 0.3  # rates at first
TEXT_RATE = 0.1  # rate, for ever: a text may become another one
MOST_SQUARES = 256.0  # of errors, added up: no rate falls below a sixteenth of its first


class TextOdds:
    """The number of one text."""

    __slots__ = ("numbers",)

    def __init__(self) -> None:
        self.numbers = array("d", (0.0,))  # changed in place, for C knows where they are


class TokenOdds:
    """The numbers of all tokens, shared by all texts, greedy and sampled."""

    __slots__ = ("numbers",)

    def __init__(self) -> None:
        # Of every kind of token a shift and squared errors: as a doubtful guess, as a likely one,
        # before a doubtful one, before a likely one. Changed in place.
        self.numbers = array("d", bytes(8 * 8 * KINDS))

    def chance(self, promised: float, token: int, before: int, text: TextOdds) -> float:
        """The chance of a guess that its drafter promises so, given that `before` is right."""
        if promised <= 0.0:
            return 0.0
        of_token, of_before = _places(promised, token, before)
        promised = min(max(promised, LEAST), MOST)
        numbers = self.numbers
        odds = math.log(promised / (1.0 - promised))
        odds = odds + numbers[of_token] + numbers[of_before] + text.numbers[0]
        return 1.0 / (1.0 + math.exp(-odds))

    def tried(self, promised: float, token: int, before: int, text: TextOdds, hit: bool) -> None:
        """A guess whose parent was reached, and whether it was the one."""
        if promised <= 0.0:
            return
        error = hit - self.chance(promised, token, before, text)
        of_token, of_before = _places(promised, token, before)
        _learn(self.numbers, of_token, TOKEN_RATE, error)
        _learn(self.numbers, of_before, BEFORE_RATE, error)
        text.numbers[0] += TEXT_RATE * error


def _places(promised: float, token: int, before: int) -> tuple[int, int]:
    likely = 2 * (promised >= LIKELY)
    return 8 * (token % KINDS) + likely, 8 * (before % KINDS) + 4 + likely


def _learn(numbers: array[float], at: int, rate: float, error: float) -> None:
    squares = min(numbers[at + 1] + error * error, MOST_SQUARES)
    numbers[at] += rate * error / math.sqrt(1.0 + squares)
    numbers[at + 1] = squares
