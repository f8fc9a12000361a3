"""The two loops: what a closed one holds back, what an open one does not, and how both end."""

import asyncio
from contextlib import suppress
from random import Random
from time import perf_counter, process_time

import pytest

from foretoken.bench.load.arrivals import Level
from foretoken.bench.load.drive import PAUSE, Limit, closed, opened, watched
from foretoken.bench.load.record import INTERRUPTED, Block, Record
from foretoken.bench.load.steady import RULES, TOO_FEW, steady_part


def record(number: int, due: float) -> Record:
    return Record(number=number, prompt=str(number), family="f", due=due)


class Desk:
    """Serves one request after the other, each in so many seconds: a server with one place."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.room, self.now, self.most = seconds, asyncio.Lock(), 0, 0

    def asked(self, zero: float):
        async def ask(one: Record) -> None:
            one.sent = perf_counter() - zero
            self.now += 1
            self.most = max(self.most, self.now)
            async with self.room:
                await asyncio.sleep(self.seconds)
            self.now -= 1
            one.ended = perf_counter() - zero
            one.pieces, one.tokens = [one.ended], 1

        return ask


def run_closed(clients: int, limit: Limit, seconds: float = 0.01, think: float = 0.0):
    block = Block(server="s", level=Level("closed", clients), round=0)

    async def run():
        desk = Desk(seconds)
        async with watched(block) as zero:
            await closed(block, record, desk.asked(zero), zero, limit, think, Random(0))
        return desk

    return block, asyncio.run(run())


def run_open(times, most: int = 100, seconds: float = 0.05):
    block = Block(server="s", level=Level("poisson", 1.0), round=0)

    async def run():
        desk = Desk(seconds)
        async with watched(block) as zero:
            await opened(block, record, desk.asked(zero), zero, times, most)
        return desk

    return block, asyncio.run(run())


def test_a_closed_loop_keeps_its_clients_busy_and_no_more() -> None:
    block, desk = run_closed(4, Limit(requests=20))
    assert desk.most == 4
    assert sorted(one.number for one in block.records) == list(range(20))
    busy = sum(one.seconds_within(0.0, block.last_sent) for one in block.records)
    assert busy / block.last_sent == pytest.approx(4.0, abs=0.3), "in flight on average"


def test_a_closed_loop_ends_by_requests_or_by_time() -> None:
    block, _ = run_closed(2, Limit(requests=1000, seconds=1.0))
    assert 3 <= len(block.records) <= 102 and block.last_sent < 1.0
    assert block.seconds >= max(one.ended for one in block.records)


def test_clients_that_think_leave_the_server_idle() -> None:
    block, desk = run_closed(2, Limit(requests=30), seconds=0.001, think=0.02)
    gaps = block.seconds - sum(one.latency for one in block.records) / 2
    assert gaps > 0.5 * 30 * 0.02 / 2 and desk.most <= 2


AT_ONCE = ["not connected", "disconnected", "http 429", "http 502", "http 503", "http 504"]


@pytest.mark.parametrize("error", [*AT_ONCE, "http 500"])
def test_clients_that_are_turned_away_come_again_after_a_while(error) -> None:
    """A server that is gone refuses at once: hundreds of thousands of times within a minute."""
    block = Block(server="s", level=Level("closed", 2), round=0)

    async def refused(one: Record) -> None:
        one.error = error
        await asyncio.sleep(0)

    async def run():
        async with watched(block) as zero:
            limit = Limit(requests=1000, seconds=1.5 * PAUSE)
            await closed(block, record, refused, zero, limit, 0.0, Random(0))

    asyncio.run(run())
    if error in AT_ONCE:
        assert len(block.records) <= 4, "twice each"
    else:
        assert len(block.records) > 100, "an error of the server's own is an answer"


def test_an_open_loop_sends_on_time_however_slow_the_server_is() -> None:
    times = [0.01 * n for n in range(20)]
    runs = [run_open(times) for _ in range(3)]
    block, desk = runs[0]
    assert block.planned == 20 and desk.most > 10, "it does not wait for answers"
    assert min(max(one.late for one in run.records) for run, _ in runs) < 0.1
    assert all(one.due == times[one.number] for one in block.records)


def test_a_wait_at_the_limit_in_flight_is_in_the_latency() -> None:
    """Coordinated omission: a server that is asked only when it is ready looks fast."""
    times = [0.01 * n for n in range(10)]
    block, desk = run_open(times, most=1, seconds=0.05)
    assert desk.most == 1 and block.held >= 8
    last = max(block.records, key=lambda one: one.number)
    assert last.ended - last.sent == pytest.approx(0.05, abs=0.04), "as the server saw it"
    assert last.latency == pytest.approx(10 * 0.05 - 0.09, abs=0.15), "as its user felt it"
    assert last.ttft == last.latency > 4 * (last.ended - last.sent)


def test_what_is_cut_off_is_kept_as_what_it_waited() -> None:
    block = Block(server="s", level=Level("closed", 3), round=0)

    async def run():
        desk = Desk(0.05)
        async with watched(block) as zero, asyncio.timeout(None) as limit:
            ask = desk.asked(zero)

            async def cut_at_the_fifth(one: Record) -> None:
                if one.number == 4:  # behind two that were answered, beside two others
                    limit.reschedule(asyncio.get_running_loop().time())
                await ask(one)

            await closed(block, record, cut_at_the_fifth, zero, Limit(requests=50), 0.0, Random(0))

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert sum(one.ok for one in block.records) == 2 and block.unfinished == 3
    assert all(one.ended > one.sent for one in block.records) and block.seconds > 0.1
    cut = [one for one in block.records if not one.ok]
    assert sorted(one.number for one in cut) == [2, 3, 4]
    assert all(one.error == INTERRUPTED and one.waited for one in cut)
    longest = max(cut, key=lambda one: one.latency)
    assert longest.number == 2 and longest.ttft == longest.latency > 0.09


def test_requests_that_wait_to_be_sent_are_cut_off_too() -> None:
    block = Block(server="s", level=Level("poisson", 1.0), round=0)

    async def run():
        async with watched(block) as zero:
            ask, times = Desk(10.0).asked(zero), [0.0, 0.01, 0.02]
            sending = asyncio.create_task(opened(block, record, ask, zero, times, 1))
            while block.held < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending

    asyncio.run(run())
    first, *held = sorted(block.records, key=lambda one: one.number)
    assert block.unfinished == 3 == len(block.records)
    assert first.seconds_within(0.0, block.seconds) > 0.05
    for one in held:
        assert one.error == INTERRUPTED and one.latency > 0.04
        assert one.seconds_within(0.0, block.seconds) == 0.0, "the server never had it"


def test_the_generator_tells_what_it_took_itself() -> None:
    async def busy(one: Record) -> None:
        until = process_time() + 0.03
        while process_time() < until:
            pass
        await asyncio.sleep(0)

    block = Block(server="s", level=Level("closed", 1), round=0)

    async def run():
        async with watched(block) as zero:
            await closed(block, record, busy, zero, Limit(requests=10), 0.0, Random(0))

    asyncio.run(run())
    assert block.cpu >= 0.3 and max(block.lags) > 0.01
    idle, _ = run_closed(1, Limit(requests=10), seconds=0.03)
    assert idle.cpu / idle.seconds < 0.5 * block.cpu / block.seconds


def block_of(kind: str, value: float, spans, last_sent: float) -> Block:
    records = [
        Record(number=n, prompt="", family="f", due=due, sent=due, ended=ended)
        for n, (due, ended) in enumerate(spans)
    ]
    return Block(
        server="s", level=Level(kind, value), round=0, records=records, last_sent=last_sent,
        seconds=max(ended for _, ended in spans),
    )  # fmt: skip


def test_the_steady_part_of_a_closed_loop_has_all_clients_at_work() -> None:
    spans = [(0.0, 1.0), (0.0, 3.0), (1.0, 2.0), (2.0, 4.0), (3.0, 5.0), (4.0, 6.0), (5.5, 9.0)]
    part = steady_part(block_of("closed", 2, spans, last_sent=5.5))
    assert (part.start, part.stop, part.rule) == (3.0, 5.5, RULES["closed"])
    few = steady_part(block_of("closed", 7, spans, last_sent=5.5))
    assert (few.start, few.stop, few.rule) == (0.0, 9.0, TOO_FEW)


def test_clients_that_ask_twice_have_no_steady_part() -> None:
    """All second requests are sent at nearly the same time: what lies between is no span."""
    spans = [(0.0, 1.0), (0.0, 1.01), (1.0, 2.0), (1.02, 2.0)]
    assert steady_part(block_of("closed", 2, spans, last_sent=1.02)).rule == TOO_FEW


def test_the_steady_part_of_an_open_loop_ends_with_the_arrivals() -> None:
    spans = [(float(n), n + 0.5) for n in range(1, 21)]
    part = steady_part(block_of("poisson", 1.0, spans, last_sent=20.0))
    assert (part.start, part.stop) == (2.0, 20.0)
    assert steady_part(block_of("day", 1.0, spans, last_sent=20.0)).start == 0.0
