"""Numbers of a load whose answer is known beforehand."""

import warnings

import numpy as np
import pytest

from foretoken.bench import intervals
from foretoken.bench.intervals import RESAMPLES, over_resamples, resampled, spread
from foretoken.bench.load.arrivals import Level
from foretoken.bench.load.hours import by_hour
from foretoken.bench.load.plots import over_day
from foretoken.bench.load.ratios import over
from foretoken.bench.load.record import Block, Record
from foretoken.bench.load.sample import Promise, floors_of, percentiles, sample_of
from foretoken.bench.load.steady import TOO_FEW
from foretoken.bench.load.summary import summary


def answered(number: int, due: float, ttft: float, tpot: float, tokens: int, **more) -> Record:
    pieces = [due + ttft + tpot * n for n in range(tokens)]
    return Record(
        number=number, prompt=str(number), family="ab"[number % 2], due=due, sent=due,
        pieces=pieces, ended=pieces[-1], tokens=tokens, counted=False, **more,
    )  # fmt: skip


def steady_stream(clients: int = 2, each: int = 20, ttft: float = 0.2, tpot: float = 0.1) -> Block:
    """Clients that ask again at once; every answer has 9 tokens and takes the same time."""
    length = ttft + 8 * tpot
    records = [
        answered(turn * clients + client, turn * length, ttft, tpot, 9)
        for turn in range(each)
        for client in range(clients)
    ]
    return Block(
        server="s", level=Level("closed", clients), round=0, records=records,
        seconds=each * length, last_sent=(each - 1) * length, lags=[0.001], cpu=0.5,
    )  # fmt: skip


def test_throughput_and_latencies_of_a_steady_stream_are_exact() -> None:
    block = steady_stream()
    found = summary([block], Promise(ttft=0.25, tpot=0.2), floors_of([block]))
    assert found["throughput"]["tokens_per_second"]["value"] == pytest.approx(18.0, rel=0.01)
    assert found["throughput"]["requests_per_second"] == pytest.approx(2.0, rel=0.06)
    assert found["throughput"]["in_flight"] == pytest.approx(2.0)
    for q in ("p50", "p90", "p95", "p99", "mean"):
        assert found["ttft"][q]["value"] == pytest.approx(0.2)
        assert found["tpot"][q]["value"] == pytest.approx(0.1)
        assert found["latency"][q]["value"] == pytest.approx(1.0)
    assert found["queue"]["p99"]["value"] == pytest.approx(0.0, abs=1e-9)
    assert found["goodput"]["share"]["value"] == 1.0 and found["tokens_from"] == "usage"
    cut = found["steady"]
    assert cut["requests"] + cut["warm_up_requests"] + cut["tail_requests"] == 40
    assert cut["seconds"] + cut["warm_up_seconds"] + cut["tail_seconds"] == pytest.approx(20.0)
    assert found["families"]["a"]["tokens_per_second"] == pytest.approx(9.0, rel=0.01)


def test_failed_requests_count_against_goodput_and_give_no_tokens() -> None:
    block = steady_stream()
    for record in block.records[4::4]:
        record.error, record.detail = "http 429", "later"
    found = summary([block], Promise(ttft=0.25), {})
    share = found["goodput"]["share"]["value"]
    assert 0.7 < share < 0.8
    assert found["errors"] == {"http 429": {"count": 9, "example": "later"}}
    speed = found["throughput"]["tokens_per_second"]["value"]
    assert speed == pytest.approx(18.0 * share, rel=0.05)
    strict = summary([block], Promise(ttft=0.1), {})["goodput"]
    assert strict["share"]["value"] == 0.0 == strict["tokens_per_second"]["value"]


def test_where_no_request_was_sent_within_the_steady_part_there_is_no_goodput() -> None:
    """One client thinks for long after its first answer, and its second request is cut off."""
    first = answered(0, 0.0, 0.2, 0.1, 9)
    block = Block(server="s", level=Level("closed", 1), round=0, records=[first], unfinished=1,
                  seconds=12.0, last_sent=11.0)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = summary([block], Promise(ttft=0.25), {})
    assert found["steady"]["requests"] == 0 and found["goodput"] is None


@pytest.mark.parametrize(
    ("kind", "due", "tokens"), [("closed", 0.0, 9), ("closed", 0.0, 1), ("poisson", 1.0, 9)]
)
def test_one_request_that_was_answered_has_a_rate(kind, due, tokens) -> None:
    one = answered(0, due, 0.2, 0.1, tokens)
    block = Block(server="s", level=Level(kind, 1), round=0, records=[one], seconds=one.ended,
                  last_sent=due)  # fmt: skip
    found = summary([block], Promise(), {})
    assert found["throughput"]["requests_per_second"] == pytest.approx(1 / one.ended)
    assert found["throughput"]["tokens_per_second"]["value"] == pytest.approx(tokens / one.ended)
    assert found["steady"]["rules"] == [TOO_FEW]


def test_what_keeps_a_promise() -> None:
    record = answered(0, 0.0, 0.2, 0.1, 9)
    assert Promise().kept(record) and not Promise().asked
    assert Promise(ttft=0.21, tpot=0.11).kept(record)
    assert not Promise(ttft=0.19).kept(record) and not Promise(tpot=0.09).kept(record)
    assert Promise(tpot=0.01).kept(answered(0, 0.0, 0.2, 0.1, 1)), "one token has no pace"
    record.error = "timeout"
    assert not Promise().kept(record)


def test_a_queue_is_the_wait_above_the_quickest_of_the_family() -> None:
    records = [answered(n, float(n), 0.1 + 0.05 * (n // 2), 0.01, 5) for n in range(20)]
    block = Block(server="s", level=Level("poisson", 1.0), round=0, records=records,
                  seconds=20.0, last_sent=19.0)  # fmt: skip
    found = summary([block], Promise(), floors_of([block]))
    gap = found["ttft"]["p50"]["value"] - found["queue"]["p50"]["value"]
    assert gap == pytest.approx(0.1)


def test_a_load_without_one_answer_has_errors_and_no_numbers() -> None:
    record = answered(0, 0.0, 0.1, 0.1, 3, error="timeout", detail="no end")
    block = Block(server="s", level=Level("closed", 1), round=0, records=[record], seconds=1.0)
    found = summary([block], Promise(), {})
    assert found["answered"] == 0 and "throughput" not in found
    assert (
        summary([Block(server="s", level=Level("closed", 1), round=0)], Promise(), {})["errors"]
        == {}
    )


def test_percentiles_are_those_of_the_values_with_intervals_around_them() -> None:
    values = np.random.default_rng(0).exponential(size=400)
    found = percentiles(np.where(np.arange(400) % 4 == 3, np.nan, values))
    known = values[np.arange(400) % 4 != 3]
    assert found["of"] == 300
    for name, q in (("p50", 50), ("p95", 95)):
        assert found[name]["value"] == pytest.approx(np.percentile(known, q))
        low, high = found[name]["interval"]
        assert low < found[name]["value"] < high
    assert percentiles(np.array([np.nan])) is None
    assert percentiles(np.array([1.0, 2.0]))["p50"]["interval"] is None


def test_intervals_hold_the_true_mean_nineteen_times_of_twenty() -> None:
    chance = np.random.default_rng(1)
    at = resampled(80)
    assert at.shape == (RESAMPLES, 80) and at.min() == 0 and at.max() == 79
    hits = 0
    for _ in range(200):
        values = chance.normal(3.0, 1.0, size=80)
        low, high = spread(values[at].mean(axis=1))
        hits += low <= 3.0 <= high
    assert 0.89 <= hits / 200 <= 0.99
    assert spread(np.array([1.0, np.nan])) is None


@pytest.mark.parametrize("count", [80, 81])
def test_many_requests_are_resampled_some_at_a_time_and_alike(count, monkeypatch) -> None:
    values, shapes = np.random.default_rng(1).normal(size=count), []

    def drawn(at):
        shapes.append(at.shape)
        return np.stack([at[:, 0], at[:, -1], values[at].sum(axis=1)])

    at_once, known = over_resamples(drawn, count), percentiles(values)
    assert shapes == [(RESAMPLES, count)] and (at_once[0] == resampled(count)[:, 0]).all()
    monkeypatch.setattr(intervals, "HELD", 7 * count + 3)
    assert (over_resamples(drawn, count) == at_once).all() and percentiles(values) == known
    assert max(shapes[1:]) == (7, count) and sum(rows for rows, _ in shapes[1:]) == RESAMPLES


def test_ratios_are_paired_so_that_prompts_fall_out() -> None:
    """Answers of very different lengths: their ratio is known far better than either."""
    chance = np.random.default_rng(2)
    lengths = chance.integers(2, 60, size=60)

    def block(pace: float) -> Block:
        records, now = [], 0.0
        for n, tokens in enumerate(lengths):
            records.append(answered(n, now, pace, pace, int(tokens)))
            now = records[-1].ended
        return Block(server="s", level=Level("closed", 1), round=0, records=records,
                     seconds=now, last_sent=records[-1].due)  # fmt: skip

    one, other = (sample_of([block(pace)], Promise(), {}) for pace in (0.02, 0.03))
    found = over(one, other)
    assert found["tokens_per_second"]["value"] == pytest.approx(1.5, rel=0.01)
    assert found["latency_p50"]["value"] == pytest.approx(2 / 3, rel=0.01)
    for name in ("tokens_per_second", "latency_p50", "ttft_p50"):
        low, high = found[name]["interval"]
        assert low <= found[name]["value"] <= high and high / low < 1.03, name
    low, high = percentiles(one.values["latency"])["p50"]["interval"]
    assert high / low > 1.2, "while the lengths alone spread latencies"


def test_requests_that_one_server_failed_are_no_part_of_the_ratio_of_latencies() -> None:
    blocks = [steady_stream(), steady_stream(ttft=0.4, tpot=0.2)]
    for record in blocks[1].records[::2]:
        record.error = "http 500"
    one, other = (sample_of([block], Promise(), {}) for block in blocks)
    found = over(one, other)
    assert found["ttft_p50"]["of"] < 20 and found["ttft_p50"]["value"] == pytest.approx(0.5)
    assert found["tokens_per_second"]["value"] == pytest.approx(4.0, rel=0.15)


def test_rounds_are_put_together() -> None:
    first, second = steady_stream(), steady_stream(ttft=0.6)
    second.round = 1
    found = summary([first, second], Promise(), {})
    assert found["requests"] == 80 and 0.2 < found["ttft"]["mean"]["value"] < 0.6
    seconds = [summary([block], Promise(), {})["steady"]["seconds"] for block in (first, second)]
    assert found["steady"]["seconds"] == pytest.approx(sum(seconds))


def test_requests_without_an_end_in_time_count_as_what_they_waited() -> None:
    """Else a server that leaves its slowest ones without an answer looks the faster for it."""
    block = steady_stream(each=40)
    for record in block.records[9::10]:
        record.error, record.ended, record.tokens = "timeout", record.due + 30.0, 0
        record.pieces = record.pieces[:1] if record.number % 20 == 9 else []
    found = summary([block], Promise(), {})
    assert found["latency"]["p50"]["value"] == pytest.approx(1.0)
    assert found["latency"]["p95"]["value"] == pytest.approx(30.0)
    assert found["ttft"]["p50"]["value"] == pytest.approx(0.2)
    assert found["ttft"]["p99"]["value"] == pytest.approx(30.0)
    assert found["tpot"]["p99"]["value"] == pytest.approx(0.1)
    assert found["answered"] == 72


def day_of(length: float, seconds: float, planned: int) -> Block:
    """A request every two seconds, until Ctrl-C where the day was planned to be longer."""
    records = [answered(n, 2.0 * n + 0.5, 0.2, 0.1, 9) for n in range(int(seconds / 2.0))]
    return Block(server="s", level=Level("day", 1.0), round=0, records=records, seconds=seconds,
                 last_sent=records[-1].due, planned=planned, length=length)  # fmt: skip


@pytest.mark.parametrize("by", ["Ctrl-C", "--requests"])
def test_hours_that_a_day_never_reached_are_no_part_of_its_rates(by) -> None:
    cut, whole = day_of(120.0, 60.0, 60), day_of(120.0, 120.0, 60)
    if by == "--requests":
        cut.planned, cut.reached = len(cut.records), 60.0
    alone, both, known = (by_hour(blocks, Promise()) for blocks in ([cut], [cut, whole], [whole]))
    for part in alone:
        wanted = (pytest.approx(4.5), pytest.approx(0.5)) if part["hour"] < 12 else (None, None)
        assert (part["tokens_per_second"], part["arrivals_per_second"]) == wanted
    for part, other in zip(both, known, strict=True):
        for name in ("tokens_per_second", "arrivals_per_second"):
            assert part[name] == pytest.approx(other[name])


def test_a_picture_of_a_day_has_a_gap_where_nothing_is_known() -> None:
    speeds = [1.0, 2.0, None, 3.0, 4.0, None]
    day = [{"hour": 4.0 * n, "until": 4.0 * n + 4.0, "speed": v} for n, v in enumerate(speeds)]
    results = {"levels": [{"kind": "day", "value": 1.0, "servers": {"s": {"day": day}}}]}
    picture = over_day(results, "A day", "speed", 1.0)
    assert picture is not None and picture.inline().count("<polyline") == 2


def test_a_promise_that_ctrl_c_left_open_is_neither_kept_nor_broken() -> None:
    """A client's last request, sent just before: to call it late would blame the server."""
    block = steady_stream()
    for record in block.records[-2:]:
        record.pieces = []
        record.cut_off(record.due + 0.01)
    found = summary([block], Promise(ttft=0.25), {})
    assert found["errors"]["interrupted"]["count"] == 2 and found["answered"] == 38
    assert found["goodput"]["share"]["value"] == 1.0
    last = block.records[-1]
    assert not Promise(ttft=0.25).told(last)
    assert Promise(ttft=0.005).told(last) and not Promise(ttft=0.005).kept(last)


def test_requests_that_ctrl_c_cut_off_early_make_no_server_quicker() -> None:
    """What ended a moment after it was sent tells of no wait; what waited longer than all does."""
    cut, whole = steady_stream(), steady_stream()
    for record in cut.records[-10:]:
        record.pieces = []
        record.cut_off(record.due + 0.001)
    found, full = (summary([block], Promise(), {}) for block in (cut, whole))
    assert found["latency"]["p50"]["value"] == pytest.approx(full["latency"]["p50"]["value"])
    samples = [sample_of([block], Promise(), {}) for block in (whole, cut)]
    assert over(*samples)["latency_p50"]["value"] == pytest.approx(1.0)
    cut.records[-1].ended = cut.records[-1].due + 99.0
    assert summary([cut], Promise(), {})["latency"]["p99"]["value"] > 1.0
