"""What a policy knows of single rows, of the step under way, and of steps without a decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from foretoken.controllers.survival import Alarm, Slots
from foretoken.trees.counts import Pace
from foretoken.types import Rows


@dataclass(slots=True)
class Record:
    """What is known of one row."""

    uid: int
    slots: Slots
    pace: Pace
    alarm: Alarm = field(default_factory=Alarm)
    idle: int = 0  # steps since the last draft
    asked: bool = False  # for a draft in the step under way
    resting: int = 0  # steps to go until a drafter that has not paid is asked again


class Rehearsals:
    """Which batches were measured, by the bit length of the number of their rows.

    A batch that is larger than all before is tried before its first step. A smaller one may only be
    what is left of a larger one, and is over by the time its costs were measured.
    """

    PATIENCE = 32  # steps of such a batch before it is tried as well

    def __init__(self) -> None:
        self.sizes = {1}
        self.met: Counter[int] = Counter()

    def lack(self, rows: int) -> bool:
        """Whether a batch of so many rows, which is about to make a step, should be tried."""
        size = rows.bit_length()
        if size in self.sizes:
            return False
        self.met[size] += 1
        return size > max(self.sizes) or self.met[size] > self.PATIENCE

    def add(self, rows: int) -> None:
        self.sizes.add(rows.bit_length())


class OfRow(Protocol):
    """Anything that is known of one row."""

    uid: int


K = TypeVar("K", bound=OfRow)


@dataclass(slots=True)
class Lull(Generic[K]):
    """Plain steps of some rows in which nothing is decided: as nothing is drafted, nothing new is
    known. A small target's step takes not much longer than a decision.
    """

    records: Sequence[K] = ()
    left: int = 0
    passed: int = 0

    def goes_on(self, rows: Rows) -> bool:
        """Whether one more step goes by like this; another batch ends it."""
        if not self.left or len(rows) != len(self.records):
            return False
        for row, known in zip(rows, self.records, strict=True):
            if row.uid != known.uid:
                return False
        self.left -= 1
        self.passed += 1
        return True


@dataclass(slots=True)
class Round:
    """What happened in the step under way."""

    rows: int = 1  # of its forward
    beside: int = 0  # of these the policy does not decide for
    told: list[Record] = field(default_factory=list)  # rows that show what the drafter does
    emitted: list[int] = field(default_factory=list)  # by each of these
    asked: bool = False  # a draft was asked for; it may have found nothing worth its price
    depth: int = 0  # deepest draft really made
    nodes: int = 0  # drafted by all rows
    lagging: bool = False  # a draft model first has to catch up
