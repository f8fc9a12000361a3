"""When requests are sent: by a number of clients that wait for their answers, or by a clock.

A closed loop has N clients, each with one request in flight: it shows what a server can do, and
waits politely for a slow one. An open loop sends at times drawn beforehand, as strangers would,
however slow the server is: it shows what users feel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

from foretoken.errors import ConfigError

HOURS = 24.0
# Load of a day in shares of its busiest hour, hour by hour from midnight: an assumption about
# services that people talk to. Quiet at four, busy before noon, a dip at midday, a second peak in
# the evening. Between full hours it goes in straight lines.
DAY = (
    0.42, 0.32, 0.24, 0.19, 0.17, 0.19, 0.26, 0.40, 0.60, 0.80, 0.93, 0.96,
    0.88, 0.84, 0.87, 0.90, 0.90, 0.88, 0.89, 0.95, 1.00, 0.94, 0.78, 0.58,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Level:
    """One load: `clients` in a closed loop, or requests per second in an open one."""

    kind: str  # closed, poisson, day
    value: float  # clients; requests per second; those of the busiest hour

    def __post_init__(self) -> None:
        finite = 0 < self.value < math.inf
        if not finite or (self.kind == "closed" and self.value != int(self.value)):
            raise ConfigError(
                f"a load of {self.value:g} was asked for ({self.kind}).",
                "concurrency is a whole number of clients, 1 or more; a rate is in requests per "
                "second, above 0.",
                "pass for example --concurrency 1,4,16 or --rate 0.5,1,2.",
            )

    @property
    def open(self) -> bool:
        """Whether requests are sent by the clock, not by clients that wait."""
        return self.kind != "closed"

    @property
    def label(self) -> str:
        if self.kind == "closed":
            return f"concurrency {self.value:g}"
        rate = f"{self.value:g}/s"
        return f"rate {rate}" if self.kind == "poisson" else f"day up to {rate}"


def poisson(rate: float, chance: Random) -> Iterator[float]:
    """Times of a Poisson process: independent gaps, exponential, `rate` of them a second."""
    at = 0.0
    while True:
        at += chance.expovariate(rate)
        yield at


def day(peak: float, seconds: float, chance: Random) -> Iterator[float]:
    """Times of a Poisson process whose rate follows a day that lasts `seconds`, by thinning.

    Candidates come at the rate of the busiest hour; each is kept with the share of its own hour.
    """
    for at in poisson(peak, chance):
        if at >= seconds:
            return
        if chance.random() < share_of_day(HOURS * at / seconds):
            yield at


def share_of_day(hour: float) -> float:
    """The rate at an hour, in shares of the busiest hour's."""
    before = int(hour)
    first, second = DAY[before % 24], DAY[(before + 1) % 24]
    return first + (hour - before) * (second - first)


def schedule(
    level: Level, requests: int | None, seconds: float | None, chance: Random
) -> list[float]:
    """All times of an open loop: so many requests, or those of so many seconds; the fewer."""
    if level.kind == "day":
        assert seconds is not None  # a day has a length
        times: Iterator[float] = day(level.value, seconds, chance)
    else:
        times = poisson(level.value, chance)
    found: list[float] = []
    for at in islice(times, requests):
        if seconds is not None and at >= seconds:
            break
        found.append(at)
    return found
