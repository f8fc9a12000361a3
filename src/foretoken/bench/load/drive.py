"""The two loops that send requests, closed and open, and a watch over the load generator itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from time import perf_counter, process_time

from foretoken.bench.load.record import Block, Record

Ask = Callable[[Record], Awaitable[None]]  # sends a request, and returns when its answer has ended
Make = Callable[[int, float], Record]  # number of the request and when it is due -> its record
NAP = 0.02  # seconds between two looks at how late the event loop is
# Errors that come at once where a server is gone or full, or is so behind a proxy: a client that
# asked again at once would send hundreds of thousands of requests, and measure itself.
TURNED_AWAY = ("not connected", "disconnected", "http 429", "http 502", "http 503", "http 504")
PAUSE = 0.2  # seconds until a client asks again that was turned away


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Where a block ends: so many requests, or so many seconds; whichever comes first."""

    requests: int | None = None
    seconds: float | None = None

    def over(self, number: int, now: float) -> bool:
        many = self.requests is not None and number >= self.requests
        return many or (self.seconds is not None and now >= self.seconds)


async def closed(
    block: Block, make: Make, ask: Ask, zero: float, limit: Limit, think: float, chance: Random
) -> None:
    """So many clients at once, each with one request in flight.

    A client that has its answer thinks for a while, exponentially distributed around `think`
    seconds, and asks for the next. One that was turned away waits before it comes again.
    """
    following = 0

    async def one_client() -> None:
        nonlocal following
        while not limit.over(following, now := perf_counter() - zero):
            number, following = following, following + 1
            block.last_sent = max(block.last_sent, now)
            record = make(number, now)
            await finished(block, record, ask, zero)
            if record.error in TURNED_AWAY:
                await asyncio.sleep(PAUSE)
            if think > 0:
                await asyncio.sleep(chance.expovariate(1.0 / think))

    async with asyncio.TaskGroup() as clients:
        for _ in range(int(block.level.value)):
            clients.create_task(one_client())


async def opened(
    block: Block, make: Make, ask: Ask, zero: float, times: Sequence[float], most: int
) -> None:
    """Requests at times drawn beforehand, however long the answers take.

    At most `most` are in flight. One that has to wait for that counts from when it was due all the
    same: leaving the wait out would hide what a slow server does to those who come later.
    """
    block.planned = len(times)
    room = asyncio.Semaphore(most)

    async def with_room(record: Record) -> None:
        block.held += room.locked()
        async with room:
            await ask(record)

    async with asyncio.TaskGroup() as requests:
        for number, due in enumerate(times):
            await asyncio.sleep(max(0.0, due - (perf_counter() - zero)))
            block.last_sent = due
            requests.create_task(finished(block, make(number, due), with_room, zero))


async def finished(block: Block, record: Record, ask: Ask, zero: float) -> None:
    """One request to its end, or to Ctrl-C, kept in the block.

    Those in flight at Ctrl-C are the slowest: without them the quick ones would speak for all.
    """
    try:
        await ask(record)
    except asyncio.CancelledError:
        record.cut_off(perf_counter() - zero)
        block.unfinished += 1
        block.records.append(record)
        raise
    block.records.append(record)


@asynccontextmanager
async def watched(block: Block) -> AsyncIterator[float]:
    """The clock of a block: when it began, how long it took, and what the generator itself took.

    A load generator without processor time to spare measures itself. How late its event loop wakes
    up is how late it may have seen a token.
    """
    zero, cpu = perf_counter(), process_time()
    watch = asyncio.create_task(look(block.lags))
    try:
        yield zero
    finally:
        block.seconds, block.cpu = perf_counter() - zero, process_time() - cpu
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def look(lags: list[float]) -> None:
    """Note how late the event loop wakes up from every nap."""
    while True:
        before = perf_counter()
        await asyncio.sleep(NAP)
        lags.append(max(0.0, perf_counter() - before - NAP))
