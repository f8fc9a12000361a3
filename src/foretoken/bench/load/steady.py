"""The steady part of a block: where the load is what it was asked to be."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nextafter
from statistics import median

from foretoken.bench.load.record import Block, Record

WARM_SHARE = 0.1  # of an open loop's span: queues fill
RULES = {
    "closed": "from when every client had its first answer (before, all prompts came at once) to "
    "when the last request was sent (afterwards clients go home)",
    "poisson": f"after the first {100 * WARM_SHARE:.0f} % of the time (queues fill), up to the "
    "last arrival",
    "day": "the whole day, up to the last arrival",
}
TOO_FEW = "all of it: too few requests for a part with the whole load"


@dataclass(frozen=True, slots=True)
class Steady:
    """A span of a block, in seconds since it began, and how it was cut."""

    start: float
    stop: float
    rule: str

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    def holds(self, record: Record) -> bool:
        """Whether a request was sent in the steady part (open loop: was due)."""
        return self.start <= record.due <= self.stop

    def ends(self, record: Record) -> bool:
        """Whether a request ended in the steady part: the last one of all ends with the block."""
        return self.start <= record.ended <= self.stop

    def tokens(self, record: Record) -> float:
        """Output tokens of a request that came in the steady part, at its very end as well."""
        return record.tokens_within(self.start, nextafter(self.stop, inf))


def steady_part(block: Block) -> Steady:
    """Cut warm-up and tail. Where nothing would be left, the whole block is taken, and says so."""
    end = max((record.ended for record in block.records), default=block.seconds)
    start, stop = warm_until(block), block.last_sent
    if start is None or stop - start <= shortest(block):
        return Steady(0.0, end, TOO_FEW)
    part = Steady(start, stop, RULES[block.level.kind])
    if block.level.open and not any(part.ends(record) for record in block.records if record.ok):
        return Steady(0.0, end, TOO_FEW)  # a server that answered them all has not written nothing
    return part


def shortest(block: Block) -> float:
    """Less than this is no steady part: clients that ask twice ask together, and then go home."""
    if block.level.open:
        return 0.0
    return median(record.ended - record.sent for record in block.records)


def warm_until(block: Block) -> float | None:
    """When the warm-up is over; None if that never came."""
    if block.level.kind == "day":
        return 0.0
    if block.level.kind == "poisson":
        return WARM_SHARE * block.last_sent
    clients = int(block.level.value)
    first = [record.ended for record in block.records if record.number < clients]
    return max(first) if len(first) == clients else None
