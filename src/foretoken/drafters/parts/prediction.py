"""A text that the caller expects, followed along the text that is written.

While both agree, the next predicted tokens are the guess. Where they part, the place is found again
by the longest run of tokens that ends the written text and lies further on in the prediction, or
else before: an insertion comes back to where it began, a deletion and a replacement go on behind
it. How far a guess goes is learned in this text alone, by how long a match was before: a prediction
that does not come true is soon not guessed from any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.drafters.parts.match_odds import EDGES, MatchOdds

OPENING = 6  # tokens that the beginning of the prediction counts as having matched
NEAREST = 32  # places looked at in each direction


@dataclass(frozen=True, slots=True)
class Place:
    """Where the written text has come to in the prediction."""

    at: int = 0  # the next predicted token; where the texts have parted, the last one known
    matched: int = OPENING  # tokens before it that agree; 0: the texts have parted


@dataclass(slots=True)
class Copied:
    """Predicted tokens, and the length of the match before each of them."""

    tokens: list[int]
    chances: list[float]  # that the text comes as far as each
    matched: list[int]


class Expected:
    """A text that is expected, as token ids, and where its pairs of tokens are; never changed, so
    that all texts of a request share it.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self.ends: dict[tuple[int, int], list[int]] = {}  # of each pair of tokens, ascending
        for end in range(2, len(self.tokens) + 1):
            self.ends.setdefault(self.tokens[end - 2 : end], []).append(end)  # type: ignore[arg-type]


class Prediction:
    """What one row is expected to say, and what became of it."""

    def __init__(self, expected: Expected | Sequence[int], start: int) -> None:
        """`start`: tokens of the row's prompt, which are no part of the text."""
        if not isinstance(expected, Expected):
            expected = Expected(expected)
        self.tokens, self.ends, self.start = expected.tokens, expected.ends, start
        self.read = start  # tokens of the row that were followed
        self.place = Place()
        self.odds = MatchOdds()
        self.accepted = self.rejected = 0  # predicted tokens that were scored

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in what was written since the last call."""
        self.place = self.behind(tokens, self.read)
        self.read = len(tokens)

    def behind(self, tokens: Sequence[int], read: int) -> Place:
        """The place behind `tokens`, of which so many were followed already."""
        place = self.place
        for size in range(read + 1, len(tokens) + 1):
            place = self.moved(place, tokens, size)
        return place

    def moved(self, place: Place, tokens: Sequence[int], size: int) -> Place:
        """The place one token further: behind the first `size` tokens."""
        known = place.at < len(self.tokens) and self.tokens[place.at] == tokens[size - 1]
        if place.matched and known:
            return Place(place.at + 1, place.matched + 1)
        if size - self.start < 2:
            return Place(place.at, 0)
        ends = self.ends.get((tokens[size - 2], tokens[size - 1]), [])
        first = bisect_right(ends, place.at)
        further, before = ends[first : first + NEAREST], ends[max(first - NEAREST, 0) : first]
        for some in (further, before[::-1]):
            if some:
                found = [Place(end, self.common(tokens, size, end)) for end in some]
                return max(found, key=lambda one: one.matched)  # of equals the nearest
        return Place(place.at, 0)

    def common(self, tokens: Sequence[int], size: int, end: int) -> int:
        """How many tokens that end at `size` and at `end` agree, as far as is told apart."""
        length, longest = 2, min(EDGES[-1], end, size - self.start)
        while length < longest and self.tokens[end - 1 - length] == tokens[size - 1 - length]:
            length += 1
        return length

    def copied(
        self, tokens: Sequence[int], count: int, least: float, greedy: bool, ends: frozenset[int]
    ) -> Copied:
        """At most `count` predicted tokens behind `tokens`, as far as they are likely enough."""
        place, found, reached = self.behind(tokens, self.read), Copied([], [], []), 1.0
        if not place.matched:
            return found
        for length, token in enumerate(
            self.tokens[place.at : place.at + max(count, 0)], place.matched
        ):
            reached *= self.odds.chance(length, 1.0, greedy)
            if reached < least:
                break
            found.tokens.append(token)
            found.chances.append(reached)
            found.matched.append(length)
            if token in ends:
                break
        return found

    def tried(self, copied: Copied, said: Sequence[int], greedy: bool) -> None:
        """Compare with the tokens that came, whether the copy was scored or not."""
        for token, length, came in zip(copied.tokens, copied.matched, said, strict=False):
            self.odds.tried(length, 1.0, greedy, token == came)
            if token != came:
                break
