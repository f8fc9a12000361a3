"""What Prometheus reads is what happened."""

import json
from collections import Counter

from live_server import wait_for
from prometheus_client.parser import text_string_to_metric_families

from foretoken.engine.record import Stats
from foretoken.serve.estimate import COUNTED, MEASURED, SEEN, Estimate, PlainSteps
from foretoken.serve.metrics import Buckets, Counts
from foretoken.types import Step, StepTimes


def figures(server) -> dict:
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_figures_add_up_to_what_was_written(make_session, running) -> None:
    prompts = ["the cat is in the ", "on and on"]
    asked = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with make_session("chain", controller="fixed", depth=3) as session:
        results = session.generate(prompts, 12, temperature=0.0, ignore_eos=True)
        with running(session) as server:
            server.post("/v1/completions", json=asked)
            server.post("/v1/completions", json={**asked, "prompt": 5})
            wait_for(lambda: server.metric("time_to_first_token_seconds_count") == 1)
            found = figures(server)
    path = "/v1/completions"
    assert found["foretoken_requests_total", path, "200"] == 1
    assert found["foretoken_requests_total", path, "400"] == 1
    assert found[("foretoken_generated_tokens_total",)] == 24
    drafted, accepted = (sum(getattr(r.stats, n) for r in results) for n in ("drafted", "accepted"))
    assert found[("foretoken_drafted_tokens_total",)] == drafted > 0
    assert found[("foretoken_accepted_tokens_total",)] == accepted > 0
    depths = sum((r.stats.accepted_at_depth for r in results), Counter())
    for depth, count in depths.items():
        assert found["foretoken_accepted_at_depth_total", str(depth)] == count
    steps = sum(r.stats.target_steps for r in results)
    assert found[("foretoken_accepted_length_count",)] == steps
    assert found[("foretoken_accepted_length_sum",)] == 24
    assert found["foretoken_step_seconds_count", "target"] == found[("foretoken_steps_total",)]
    assert found["foretoken_step_seconds_sum", "target"] > 0
    assert found["foretoken_cache_rows", "target"] == 0 == found["foretoken_cache_rows", "draft"]
    assert (
        found["foretoken_cache_bytes", "target"] > found["foretoken_cache_bytes", "draft"] / 2 > 0
    )
    assert found[("foretoken_goodput_tokens_per_second",)] > 0
    assert found[("foretoken_time_per_output_token_seconds_count",)] == 1


def test_a_text_is_counted_while_its_prompt_is_read(make_session, running, monkeypatch) -> None:
    seen = []
    with make_session("plain") as session, running(session) as server:
        read = session.engine.target.prefill

        def looking(*given, **named):
            seen.append(server.metric("running_rows"))
            return read(*given, **named)

        monkeypatch.setattr(session.engine.target, "prefill", looking)
        asked = {"prompt": "the cat", "max_tokens": 3}
        assert server.post("/v1/completions", json=asked).status_code == 200
    assert seen and set(seen) == {1}


def test_requests_that_are_not_even_read_are_counted_and_told(
    make_session, running, tmp_path
) -> None:
    log, path = tmp_path / "log", "/v1/completions"
    limits = {"api_keys": ("one",), "max_body": 5000, "log_file": log}
    with make_session("plain") as session, running(session, **limits) as server:

        def counted(where: str, code: str) -> None:
            wait_for(lambda: server.metric("request_errors_total", path=where, code=code) == 1)

        server.post(path, json={"prompt": "a"}, headers={"authorization": "Bearer two"})
        counted(path, "invalid_api_key")
        large, key = {"prompt": "a" * 6000}, {"authorization": "Bearer one"}
        server.post(path, json=large, headers=key)
        counted(path, "body_too_large")
        server.get("/v2")
        counted("other", "invalid_request_error")
        server.get(path, headers=key)
        counted(path, "invalid_request_error")
    told = [json.loads(line)["error"] for line in log.read_text().splitlines()]
    assert told == ["invalid_api_key", "body_too_large", "invalid_request_error"]


def test_no_name_of_a_user_breaks_a_line_of_the_log(make_session, running, tmp_path) -> None:
    log, user = tmp_path / "log", "a\u2028b\x85c"
    with make_session("plain") as session, running(session, log_file=log) as server:
        asked = {"prompt": "a", "max_tokens": 2, "user": user}
        assert server.post("/v1/completions", json=asked).status_code == 200
    [line] = log.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["requester"] == user


def test_metrics_can_be_left_out(make_session, running) -> None:
    with make_session("plain") as session, running(session, metrics=False) as server:
        assert server.get("/metrics").status_code == 404


def test_buckets_count_what_lies_at_or_below_a_bound() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        buckets.add(value)
    assert buckets.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert buckets.total == 14.0


def test_a_text_is_counted_while_its_last_step_adds_a_depth() -> None:
    """As another thread may: here it does so whenever a depth is looked up."""
    stats = Stats()

    class Depth(int):
        def __hash__(self):
            stats.drafted_at_depth[100 + len(stats.drafted_at_depth)] += 1
            return int.__hash__(self)

    counts = Counts(PlainSteps({}))
    counts.drafted_at[1] = 2
    stats.drafted_at_depth[1] = 3
    stats.drafted_at_depth[Depth(2)] = 5
    before = len(stats.drafted_at_depth)
    counts.text(stats)
    assert len(stats.drafted_at_depth) > before
    assert counts.drafted_at[1] == 5 and counts.drafted_at[2] == 5


def step(rows: int, nodes: int, seconds: float, prefill: float = 0.0) -> Step:
    times = StepTimes(rows, nodes, 10, 0.0, seconds, 0.0, prefill=prefill)
    return Step((), (), (), (), (), times)


def test_the_estimate_compares_with_plain_steps_of_as_many_rows() -> None:
    plain = PlainSteps({1: 0.010, 4: 0.020})
    assert plain.seconds(1) == (0.010, MEASURED) and plain.seconds(3) == (0.020, MEASURED)
    plain.step(step(2, 2, 0.040, prefill=2e-6))  # nobody waited
    plain.step(step(2, 8, 9.0))  # it drafts
    plain.step(step(2, 2, 9.0, prefill=1.0))  # somebody's prompt was fed before it
    assert plain.seconds(2) == (0.040, SEEN)
    estimate = Estimate(plain)
    estimate.step(step(2, 8, 0.080), tokens=4)
    assert estimate.to_dict() == {"speedup": 2.0, "how": SEEN}
    counted = Estimate(PlainSteps({}))
    counted.step(step(1, 5, 1.0), tokens=3)
    counted.step(step(1, 5, 1.0), tokens=2)
    assert counted.to_dict() == {"speedup": 2.5, "how": COUNTED}
    assert plain.seconds(9) == (None, COUNTED)
