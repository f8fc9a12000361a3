"""Whole load tests against small servers: the numbers, the turns, the reports, going on."""

import asyncio
import json
import re
from contextlib import suppress
from html import unescape
from statistics import median
from xml.etree import ElementTree

import pytest
from small_server import serving

import foretoken
from foretoken.bench import environment
from foretoken.bench.load import words
from foretoken.bench.load.address import servers_of
from foretoken.bench.load.arrivals import Level
from foretoken.bench.load.config import LoadConfig
from foretoken.bench.load.journal import NAME, read_journal
from foretoken.bench.load.prompts import Prompts, Writing, check_prompts
from foretoken.bench.load.run import Run, run_load, turns_of
from foretoken.bench.load.sample import Promise
from foretoken.bench.tasks import single
from foretoken.errors import ConfigError

TASKS = [single(f"say {n}", id=f"t{n}", family=("qa", "rag")[n % 2]) for n in range(60)]
FOUR = (Level("closed", 4),)


def config(out, *servers, levels=FOUR, names=(), **changes) -> LoadConfig:
    options = {"writing": Writing(max_tokens=10, seed=0), "quiet": True, "timeout": 10.0, **changes}
    found = servers_of([server.url for server in servers], names)
    return LoadConfig(servers=tuple(found), levels=levels, out=out, **options)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two servers, one of them with three times the delays of the other, at two loads."""
    out = tmp_path_factory.mktemp("load")
    with (
        serving(first=0.03, each=0.006, models=("small",)) as quick,
        serving(first=0.09, each=0.018, models=("large",)) as slow,
    ):
        asked = config(
            out, quick, slow, names=("quick", "slow"), requests=16,
            levels=(Level("closed", 1), Level("closed", 2)),
            promise=Promise(ttft=0.088), api_key="do-not-tell",
        )  # fmt: skip
        results = run_load(asked, TASKS)
        return results, out, quick, slow


def test_every_request_has_the_times_that_its_server_gave_it(compared) -> None:
    _, out, quick, slow = compared
    servers = {"quick": quick, "slow": slow}
    gaps = []
    for block in read_journal(out / NAME)[1].blocks:
        server = servers[block.server]
        first = 16 * (block.level.value - 1) + 8 * block.round
        for record in block.records:
            at = 3 + [one["seed"] for one in server.asked[3:]].index(first + record.number)
            truly = server.written[at]
            assert record.ok and record.tokens == 10 == len(record.pieces)
            assert record.ttft >= truly[0] - server.came[at] >= server.first
            gaps += [
                record.ttft - (truly[0] - server.came[at]),
                record.tpot - (truly[-1] - truly[0]) / 9,
            ]
    assert len(gaps) == 2 * 2 * 32
    assert abs(median(gaps)) < 0.01, "what a busy machine adds"
    assert sorted(gaps)[-5] < 0.3, "nor more, where it stands still once"


def test_throughput_is_requests_in_flight_over_their_latency(compared) -> None:
    for level in compared[0]["levels"]:
        for row in level["servers"].values():
            assert row["answered"] == row["requests"] == 16 and not row["errors"]
            assert row["throughput"]["in_flight"] == pytest.approx(level["value"], rel=0.05)
            speed = row["throughput"]["tokens_per_second"]["value"]
            wanted = level["value"] * 10 / row["latency"]["mean"]["value"]
            assert speed == pytest.approx(wanted, rel=0.25), "Little's law"


def test_servers_are_compared_on_the_same_requests(compared) -> None:
    results, _, quick, slow = compared
    for level in results["levels"]:
        found = level["over"]["quick over slow"]
        assert found["tokens_per_second"]["value"] > 1.2 and found["latency_p50"]["value"] < 0.8
        low, high = found["tokens_per_second"]["interval"]
        assert 1.0 < low < high < 5.0
    prompts = [[one["messages"][0]["content"] for one in side.asked] for side in (quick, slow)]
    assert sorted(prompts[0]) == sorted(prompts[1])
    assert [one["model"] for one in slow.asked] == ["large"] * 35
    assert sorted(one["seed"] for one in quick.asked[3:]) == list(range(32))
    assert len(set(prompts[0])) == 35, "no prompt comes twice, not even at another load"


def test_goodput_is_the_share_within_the_targets(compared) -> None:
    for level in compared[0]["levels"]:
        good = {name: row["goodput"] for name, row in level["servers"].items()}
        assert good["quick"]["share"]["value"] > 0.3
        assert good["slow"]["share"]["value"] == 0.0
        assert good["slow"]["tokens_per_second"]["value"] == 0.0


def test_the_reports_say_what_they_must_and_no_secret(compared) -> None:
    results, out, *_ = compared
    assert json.loads((out / "load.json").read_text()) == json.loads(json.dumps(results))
    text, page = (out / "load.md").read_text(), (out / "page.html").read_text()
    for told in ("quick over slow", "concurrency 2", "TTFT p95", "TPOT p50", "latency p99",
                 "tokens/s", "good", "steady part", "warm-up", "tail", "generator's share",
                 "queue", "model large", "qa", "rag", "usage", "cores"):  # fmt: skip
        assert told in text and told in unescape(page), told
    assert re.search(r"\| concurrency 2 \| quick \| \d+\.\d \[\d+\.\d, \d+\.\d\] \|", text)
    names = {path.stem for path in (out / "plots").glob("*.svg")}
    assert names == {"throughput", "ttft", "tpot", "latency", "goodput"}
    for path in (out / "plots").glob("*.svg"):
        ElementTree.parse(path)
        assert f"plots/{path.name}" in text
    assert "http://" not in page.replace("http://www.w3.org", ""), "nothing is fetched"
    for path in out.rglob("*"):
        assert path.is_dir() or "do-not-tell" not in path.read_text()
    assert not results["prompts"]["repeated"] and not results["interrupted"]


def test_servers_take_turns_within_a_load() -> None:
    servers = servers_of(["127.0.0.1:1", "127.0.0.1:2"], ["a", "b"])
    levels = [Level("closed", 1), Level("closed", 4)]
    found = [(level.value, number, s.name) for level, number, s in turns_of(levels, servers, 2)]
    assert found == [
        (value, number, name)
        for value in (1, 4)
        for number, name in [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    ]


def test_faults_are_counted_and_the_rest_is_measured(tmp_path) -> None:
    faults = {9: "429", 12: "drop", 15: "malformed", 18: "500", 21: "drop"}
    with serving(first=0.01, each=0.001, fault=faults.get) as server:
        results = run_load(config(tmp_path, server, requests=40), TASKS)
    row = results["levels"][0]["servers"][next(iter(results["servers"]))]
    assert {kind: one["count"] for kind, one in row["errors"].items()} == {
        "disconnected": 2, "http 429": 1, "malformed": 1, "http 500": 1,
    }  # fmt: skip
    assert (row["requests"], row["answered"]) == (40, 35)
    assert "fault 429" in (tmp_path / "load.md").read_text()


def test_an_overloaded_server_shows_in_an_open_loop(tmp_path) -> None:
    """It can answer ten requests a second and gets thirty."""
    with serving(first=0.05, each=0.0056, slots=1) as server:
        asked = config(tmp_path, server, levels=(Level("poisson", 30.0),), requests=24)
        results = run_load(asked, TASKS)
    row = next(iter(results["levels"][0]["servers"].values()))
    assert row["answered"] == 24 and row["client"]["held"] == 0
    assert row["ttft"]["p95"]["value"] > 10 * 0.05, "the queue is in it"
    queue, wait = row["queue"]["p50"]["value"], row["ttft"]["p50"]["value"]
    assert 0.5 * wait < queue < wait
    assert row["throughput"]["requests_per_second"] < 15


def test_a_day_is_told_hour_by_hour(tmp_path) -> None:
    with serving(first=0.005, each=0.001) as server:
        asked = config(tmp_path, server, levels=(Level("day", 60.0),), seconds=2.0)
        results = run_load(asked, TASKS)
    row = next(iter(results["levels"][0]["servers"].values()))
    hours = row["day"]
    assert [one["hour"] for one in hours] == [2.0 * n for n in range(12)]
    assert sum(one["requests"] for one in hours) == row["requests"] > 40
    night, evening = hours[2], hours[10]
    assert night["arrivals_per_second"] < evening["arrivals_per_second"]
    names = {path.stem for path in (tmp_path / "plots").glob("*.svg")}
    assert names == {"day", "day-ttft"}, "one load makes no curve over loads"
    assert results["prompts"]["repeated"] is (row["requests"] > 60 - asked.warm_up)


def test_hours_that_a_day_of_few_requests_never_reached_have_no_rates(tmp_path) -> None:
    with serving(first=0.005, each=0.001) as server:
        asked = config(tmp_path, server, levels=(Level("day", 60.0),), seconds=2.0, requests=20)
        results = run_load(asked, TASKS)
    hours = next(iter(results["levels"][0]["servers"].values()))["day"]
    assert sum(one["requests"] for one in hours) == 20
    assert hours[0]["tokens_per_second"] is not None
    assert hours[-1]["tokens_per_second"] is None is hours[-1]["arrivals_per_second"]
    assert (tmp_path / "plots" / "day.svg").exists()


def test_tokens_are_counted_where_a_server_tells_no_usage(tmp_path) -> None:
    with serving(first=0.002, each=0.001, knows_usage=False) as server:
        results = run_load(config(tmp_path, server, requests=16), TASKS)
    row = next(iter(results["levels"][0]["servers"].values()))
    assert row["tokens_from"] == "pieces" and row["tokens"] == 10.0
    assert "10.0, pieces" in (tmp_path / "load.md").read_text()


def test_answers_in_one_piece_have_no_time_to_first_token(tmp_path) -> None:
    with serving(first=0.01, each=0.001) as server:
        writing = Writing(max_tokens=8, stream=False, endpoint="completions")
        results = run_load(config(tmp_path, server, requests=20, writing=writing), TASKS)
        assert server.asked[-1]["prompt"].startswith("say")
    row = next(iter(results["levels"][0]["servers"].values()))
    assert row["ttft"] is None and row["latency"]["p50"]["value"] > 0.017
    columns, _ = words.table(results)
    assert "TTFT p50" not in columns and "latency p50" in columns


def test_an_interrupted_test_reports_what_it_did_and_goes_on(tmp_path, monkeypatch) -> None:
    levels = (Level("closed", 1), Level("closed", 2))
    measured = Run.one
    blocks = []

    async def stopped(run, block, client, first):
        await measured(run, block, client, first)
        blocks.append(block.key)
        if len(blocks) == 2:
            raise KeyboardInterrupt

    with serving(first=0.005, each=0.001) as server:
        asked = config(tmp_path, server, levels=levels, requests=12, names=("s",))
        monkeypatch.setattr(Run, "one", stopped)
        found = run_load(asked, TASKS)
        assert found["interrupted"] and len(found["levels"]) == 2
        assert "interrupted" in (tmp_path / "load.md").read_text()
        assert len(read_journal(tmp_path / NAME)[1].blocks) == 1
        with pytest.raises(ConfigError, match="go on with --resume"):
            run_load(asked, TASKS)
        more = config(tmp_path, server, levels=levels, requests=13, names=("s",), resume=True)
        with pytest.raises(ConfigError, match="requests differ"):
            run_load(more, TASKS)

        again = config(tmp_path, server, levels=levels, requests=12, names=("s",), resume=True)
        results = run_load(again, TASKS)
    assert blocks == ["concurrency 1 / 0 / s", "concurrency 2 / 0 / s", "concurrency 2 / 0 / s"]
    assert not results["interrupted"]
    kept, before = (one["levels"][0]["servers"]["s"]["latency"] for one in (results, found))
    assert kept["p50"]["value"] == pytest.approx(before["p50"]["value"], abs=2e-4)
    assert read_journal(tmp_path / NAME)[1].finished


def test_what_hung_at_ctrl_c_is_in_the_latencies(tmp_path, monkeypatch) -> None:
    """Else a server that hangs looks as quick as the answers that it gave before."""
    measured = Run.one

    async def stopped(run, block, client, first):
        measuring = asyncio.create_task(measured(run, block, client, first))
        while len(server.asked) < 10 or server.running < 4:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        measuring.cancel()
        with suppress(asyncio.CancelledError):
            await measuring
        raise KeyboardInterrupt

    def hangs(number: int) -> float:
        return 30.0 * (number > 2 and number % 2)  # of three that warm up none does

    monkeypatch.setattr(Run, "one", stopped)
    with serving(first=0.002, each=0.001, slow_first=hangs) as server:
        asked = config(tmp_path, server, names=("s",), requests=40, promise=Promise(ttft=0.2))
        results = run_load(asked, TASKS)
    row = results["levels"][0]["servers"]["s"]
    assert (row["requests"], row["answered"], row["unfinished"]) == (7, 3, 4)
    assert row["errors"]["interrupted"]["count"] == 4
    assert row["latency"]["p50"]["value"] > 0.3 and row["ttft"]["p50"]["value"] > 0.3
    assert row["goodput"]["share"]["value"] < 0.5, "they were late by then"
    [warning] = [text for text in results["warnings"] if "cut off by Ctrl-C" in text]
    assert "4 requests" in warning and warning in (tmp_path / "load.md").read_text()


def test_blocks_of_another_model_or_machine_are_not_gone_on_with(tmp_path, monkeypatch) -> None:
    measured, levels = Run.one, (Level("closed", 1), Level("closed", 2))

    async def stopped(run, block, client, first):
        if block.level.value == 2:
            raise KeyboardInterrupt
        await measured(run, block, client, first)

    def asked(server, resume: bool = True) -> LoadConfig:
        return config(tmp_path, server, levels=levels, requests=4, names=("s",), resume=resume)

    quick = {"first": 0.002, "each": 0.001}
    with serving(**quick, models=("a",)) as one, serving(**quick, models=("b",)) as other:
        with monkeypatch.context() as patched:
            patched.setattr(Run, "one", stopped)
            assert run_load(asked(one, resume=False), TASKS)["interrupted"]
        with pytest.raises(ConfigError, match="another model: a -> b"):
            run_load(asked(other), TASKS)
        with monkeypatch.context() as patched:
            patched.setattr(environment, "cpu", lambda: "quicker one")
            with pytest.raises(ConfigError, match=r"another processor: .* -> quicker one"):
                run_load(asked(one), TASKS)
        with monkeypatch.context() as patched:
            patched.setattr(foretoken, "__version__", "0.0")
            with pytest.raises(ConfigError, match=r"another version: .* -> 0\.0"):
                run_load(asked(one), TASKS)
        assert len(read_journal(tmp_path / NAME)[1].blocks) == 1, "nothing was measured"

        lines = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
        assert [line.pop("made", None) is not None for line in lines] == [False, True]
        old = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / NAME).write_text(old)  # one of before told nothing of this
        assert not run_load(asked(other), TASKS)["interrupted"]


def test_a_journal_cut_off_in_its_last_line_is_read(tmp_path) -> None:
    with serving(first=0.002, each=0.001) as server:
        run_load(config(tmp_path, server, requests=8), TASKS)
    path = tmp_path / NAME
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[1][:50])
    _, journal = read_journal(path)
    assert len(journal.blocks) == 1 and len(journal.blocks[0].records) == 8
    path.write_text(lines[0] + "{}\n")
    with pytest.raises(ConfigError, match=r"line 2 of journal\.jsonl"):
        read_journal(path)


def test_what_cannot_be_measured_is_refused() -> None:
    server = servers_of(["127.0.0.1:1"], [])
    level = (Level("closed", 1),)
    for change, told in (
        ({"requests": 0}, "requests is 1 or more"),
        ({"seconds": -1.0}, "seconds is a number of seconds above 0"),
        ({"models": ("a", "b")}, "2 models were named for 1 servers"),
        ({"writing": Writing(stream=False), "promise": Promise(ttft=1.0)}, "--no-stream"),
    ):
        with pytest.raises(ConfigError, match=told):
            LoadConfig(servers=tuple(server), levels=level, **change)
    for change, told in (
        ({"max_tokens": 0}, "max_tokens is 1"),
        ({"temperature": -1.0}, "0 or more"),
    ):
        with pytest.raises(ConfigError, match=told):
            Writing(**change)
    ids = [single([1, 2, 3], id="ids", family="f")]
    with pytest.raises(ConfigError, match="pass --endpoint completions"):
        check_prompts(ids, Writing())
    check_prompts(ids, Writing(endpoint="completions"))
    with pytest.raises(ConfigError, match="without prompts"):
        check_prompts([], Writing())


def test_prompts_come_in_an_order_of_their_seed_and_then_again() -> None:
    one, same, other = Prompts(TASKS, 1), Prompts(TASKS, 1), Prompts(TASKS, 2)
    order = [one.at(n).id for n in range(60)]
    assert order == [same.at(n).id for n in range(60)] != [other.at(n).id for n in range(60)]
    assert sorted(order) == sorted(task.id for task in TASKS) and not one.repeated
    assert one.at(60).id == order[0] and one.repeated
    assert one.spare(0).id == order[-1]


def test_a_prompt_of_the_warm_up_that_is_measured_came_again() -> None:
    one = Prompts(TASKS)
    warm = {one.spare(n).id for n in range(3)}
    assert warm.isdisjoint(one.at(n).id for n in range(57)) and not one.repeated
    assert one.at(57).id in warm and one.repeated
