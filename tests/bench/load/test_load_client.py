"""The client against a real server whose delays are known, and against one that fails."""

import asyncio
from statistics import median
from time import perf_counter

import pytest
from small_server import serving

from foretoken.bench.load.address import Server, api_of, servers_of
from foretoken.bench.load.client import connected
from foretoken.bench.load.events import Events, Malformed, read
from foretoken.bench.load.meeting import meet
from foretoken.bench.load.prompts import Prompts, Writing
from foretoken.bench.load.record import Record
from foretoken.bench.tasks import single
from foretoken.errors import ConfigError

TASK = single("say a", id="t", family="f")


def ask(server, count=1, timeout=10.0, usage=True, **writing):
    """Records of requests made at once; their times on the clock of the server."""
    asked = Writing(**{"max_tokens": 10, **writing})

    async def all_of_them():
        async with connected(Server("small", api_of(server.url)), timeout) as client:
            due = perf_counter()
            records = [Record(number=n, prompt="t", family="f", due=due) for n in range(count)]
            bodies = [asked.body(TASK, n, "small", usage) for n in range(count)]
            async with asyncio.TaskGroup() as group:
                for record, body in zip(records, bodies, strict=True):
                    group.create_task(client.ask(record, asked.path, body, 0.0))
            return records

    return asyncio.run(all_of_them())


def behind(record, truly):
    """Whether its pieces came when they were written, or soon after, as two threads of a busy
    machine go: one that stands still for a moment says nothing."""
    late = [came - said for came, said in zip(record.pieces, truly, strict=True)]
    return min(late) >= 0 and median(late) < 0.03


def from_its_pieces(record):
    """Whether its figures are those of its pieces, of which behind the first there are nine."""
    first, last = record.pieces[0], record.pieces[-1]
    assert record.tpot == pytest.approx((last - first) / 9)
    return record.ttft == first - record.due and record.latency == record.ended - record.due


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_times_are_those_of_the_server(endpoint) -> None:
    with serving(first=0.1, each=0.02) as server:
        record = ask(server, endpoint=endpoint)[0]
        truly = server.written[0]
    assert record.ok and record.finish == "length" and record.tokens == 10 and not record.counted
    assert record.prompt_tokens == 7
    assert behind(record, truly) and len(truly) == 10
    assert from_its_pieces(record) and record.ended >= record.pieces[-1]
    assert record.ttft > 0.1 and record.tpot > 0.018


def test_latency_counts_from_when_a_request_was_due() -> None:
    record = Record(
        number=0, prompt="", family="", due=1.0, sent=3.0, pieces=[4.0, 5.0], ended=6.0, tokens=3
    )
    assert (record.ttft, record.latency, record.late, record.tpot) == (3.0, 5.0, 2.0, 0.5)
    assert record.seconds_within(0.0, 5.0) == 2.0, "in flight from when it was sent"
    assert record.tokens_within(0.0, 4.5) == 1.5


def test_the_servers_count_goes_before_pieces() -> None:
    with serving(per_piece=4, first=0.01, each=0.001) as server:
        record = ask(server)[0]
        blind = ask(server, usage=False)[0]
    assert (len(record.pieces), record.tokens, record.counted) == (3, 10, False)
    assert (blind.tokens, blind.counted) == (3, True)


def test_an_answer_in_one_piece_has_latency_and_tokens_only() -> None:
    with serving(first=0.02, each=0.01) as server:
        records = [ask(server, stream=False)[0] for _ in range(3)]
        truly = [pieces[0] for pieces in server.written]
    record = records[0]
    assert record.ok and record.tokens == 10 and record.ttft is None and record.tpot is None
    late = [one.ended - said for one, said in zip(records, truly, strict=True)]
    assert 0 <= min(late) < 0.03 and record.latency == record.ended - record.due > 0.11
    assert record.tokens_within(record.due, record.ended + 1.0) == 10.0


def test_every_fault_is_an_error_of_its_own_kind() -> None:
    kinds = {
        "429": ("http 429", "fault 429"),
        "500": ("http 500", "fault 500"),
        "drop": ("disconnected", ""),
        "cut": ("cut off", "without a finish_reason"),
        "malformed": ("malformed", "no JSON"),
        "said": ("server error", "out of memory"),
        "no stream": ("malformed", "no event came (application/json)"),
        "silent": ("timeout", "0.5 s"),
    }
    for fault, (kind, detail) in kinds.items():
        with serving(first=0.005, each=0.001, fault=lambda number, fault=fault: fault) as server:
            record = ask(server, timeout=0.5 if fault == "silent" else 10.0)[0]
        assert record.error == kind and detail in record.detail, fault
        assert record.ended > 0 and not record.ok


def test_one_failed_request_leaves_its_neighbours_alone() -> None:
    faults = {1: "drop", 2: "malformed", 3: "500"}
    with serving(first=0.01, each=0.002, fault=faults.get) as server:
        records = ask(server, count=6)
    assert sum(record.ok for record in records) == 3
    assert {record.error for record in records} == {None, "disconnected", "malformed", "http 500"}


def test_nobody_listening_is_told_apart_from_a_lost_connection() -> None:
    with serving() as server:
        pass
    assert ask(server)[0].error == "not connected"


def test_a_slow_first_token_is_in_the_time_to_first_token_alone() -> None:
    with serving(first=0.01, each=0.005, slow_first=lambda number: 0.3) as server:
        record = ask(server)[0]
        truly = server.written[0]
    assert behind(record, truly) and from_its_pieces(record)
    assert record.ttft > 0.31 and 0.0045 < record.tpot < 0.1


def test_connections_are_used_again() -> None:
    async def one_after_the_other(server):
        writing = Writing(max_tokens=3)
        async with connected(Server("small", api_of(server.url)), 5.0) as client:
            for n in range(5):
                record = Record(number=n, prompt="", family="", due=0.0)
                await client.ask(record, writing.path, writing.body(TASK, n, "m", True), 0.0)
                assert record.ok

    with serving(first=0.002, each=0.001) as server:
        asyncio.run(one_after_the_other(server))
        assert server.connections == 1 and len(server.asked) == 5


def test_requests_that_follow_answers_which_ended_together_are_sent_at_once() -> None:
    """A server that batches ends many answers at one time, and gets as many new requests then."""
    clients, writing = 48, Writing(max_tokens=2)

    async def waves(server):
        late = []
        async with connected(Server("small", api_of(server.url)), 20.0) as client:
            for wave in range(4):
                records = [Record(number=n, prompt="", family="", due=0.0) for n in range(clients)]
                async with asyncio.TaskGroup() as group:
                    for one in records:
                        body = writing.body(TASK, one.number, "m", True)
                        group.create_task(client.ask(one, writing.path, body, 0.0))
                assert all(one.ok for one in records)
                came = server.came[clients * wave :]
                late += [max(came) - min(one.sent for one in records)]
        return late

    with serving(first=1.0, each=0.001) as server:
        late = asyncio.run(waves(server))
        assert server.connections == clients
    assert median(late[1:]) < server.first, "all of a wave are there before its first answer begins"


def test_events_may_be_cut_anywhere_and_hold_other_line_ends() -> None:
    stream = (
        'data: {"a": "\u2028é"}\r\n\r\n: still here\n\nevent: x\ndata: 1\ndata: 2\n\ndata: [DONE]'
    )
    wanted = ['{"a": "\u2028é"}', "1\n2", "[DONE]"]
    data = stream.encode()
    for size in (1, 2, 3, 7, len(data)):
        reader = Events()
        found = [e for n in range(0, len(data), size) for e in reader.feed(data[n : n + size])]
        assert found + reader.end() == wanted


NO_ANSWERS = (
    "x",
    "[1]",
    "{}",
    '{"choices": 1}',
    '{"choices": [1]}',
    '{"choices": [{"delta": "a"}]}',
    '{"choices": [], "usage": 3}',
)


@pytest.mark.parametrize("said", NO_ANSWERS)
def test_what_is_no_answer_is_malformed(said) -> None:
    with pytest.raises(Malformed):
        read(said)


def test_thoughts_and_calls_are_output_and_roles_are_not() -> None:
    def text(delta) -> bool:
        return read(f'{{"choices": [{{"delta": {delta}}}]}}').text

    assert text('{"reasoning_content": "hm"}') and text('{"tool_calls": [{"index": 0}]}')
    assert not text('{"role": "assistant", "content": ""}')


def met(server, warm=2, api_key=None, model=None, **writing):
    async def first_words():
        where = Server("small", api_of(server.url))
        async with connected(where, 5.0, api_key) as client:
            asked = Writing(**{"max_tokens": 4, **writing})
            return await meet(client, asked, Prompts([TASK]), model, warm)

    return asyncio.run(first_words())


def test_the_model_and_the_count_of_tokens_are_found_out_first() -> None:
    with serving(first=0.001, each=0.0, models=("one", "two")) as server:
        found = met(server)
        assert (found.model, found.usage, found.counts) == ("one", True, True)
        assert len(server.asked) == 2 and server.asked[0]["model"] == "one"
        assert met(server, model="two").model == "two"
    with serving(first=0.001, each=0.0, knows_usage=False) as server:
        found = met(server)
        assert (found.usage, found.counts) == (False, False)
        assert "stream_options" not in server.asked[-1]


def test_a_seed_is_sent_where_one_was_asked_for() -> None:
    """A server that has to repeat a text may be slower than for users, who seldom ask for that."""
    assert "seed" not in Writing().body(TASK, 3, "m", True)
    assert Writing(seed=0).body(TASK, 3, "m", True)["seed"] == 3


def test_a_server_that_cannot_be_asked_is_a_mistake_in_three_parts() -> None:
    with serving(key="secret") as server:
        with pytest.raises(ConfigError, match=r"401: .*a key is wanted.*\n.*--model NAME"):
            met(server)
        assert met(server, api_key="secret").model == "small"
    with serving(models=()) as server, pytest.raises(ConfigError, match="does not list any"):
        met(server)
    told = pytest.raises(ConfigError, match=r"http 500: .*fault 500")
    with serving(fault=lambda number: "500") as server, told:
        met(server)
    with pytest.raises(ConfigError, match="no server answers at"):
        met(server)


def test_only_this_machine_is_loaded_without_leave() -> None:
    for address in (
        "http://127.0.0.1:8000",
        "http://localhost:1",
        "http://[::1]:80",
        "127.0.0.5:8",
    ):
        assert api_of(address).endswith("/v1")
    for address in ("http://10.0.0.1", "http://example.com:8000", "http://127.0.0.1.example.com",
                    "http://0.0.0.0:80", "http://127.0.0.1@example.com/"):  # fmt: skip
        with pytest.raises(ConfigError, match="pass --allow-remote") as refused:
            api_of(address)
        assert "somebody else's server" in refused.value.possible
        assert api_of(address, allow_remote=True)
    for address in ("ftp://127.0.0.1", "http://", "http://127.0.0.1:port", "http://localhost/?a=1"):
        with pytest.raises(ConfigError, match="an address is"):
            api_of(address)


def test_servers_have_names_of_their_own() -> None:
    urls = ["http://127.0.0.1:1/v1/", "http://user:key@127.0.0.1:2"]
    found = servers_of(urls, [])
    assert [server.name for server in found] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert found[0].url == "http://127.0.0.1:1/v1"
    with pytest.raises(ConfigError, match="1 names were passed for 2 servers"):
        servers_of(urls, ["a"])
    with pytest.raises(ConfigError, match="two servers are called a"):
        servers_of(urls, ["a", "a"])
