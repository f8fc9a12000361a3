"""What scripts gate: nothing that failed is left out, and nothing known flatters a figure."""

import importlib
import re
from pathlib import Path

import pytest

from foretoken.engine.assemble import assemble
from foretoken.lm.table import TableLM
from foretoken.methods import method, settled
from foretoken.types import SamplingParams

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """Imports a script by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def row(speed, first, answered=10, requests=10):
    found = {"answered": answered, "requests": requests}
    if answered:
        found["throughput"] = {"tokens_per_second": {"value": speed}}
        found["ttft"] = {"p50": {"value": first}}
    return found


def judged(module, servers):
    results = {"levels": [{"value": 4.0, "servers": servers}]}
    gates = module("serving").verdicts(results, "default", ["vllm", "llama.cpp"])
    return {gate.claim: gate for gate in gates}


def test_a_server_that_answers_nothing_fails_its_gates(module):
    peers = {"vllm": row(50.0, 0.2), "llama.cpp": row(80.0, 0.3)}
    found = judged(module, {"default": row(100.0, 0.1), "plain": row(90.0, 0.1), **peers})
    assert all(gate.holds for gate in found.values()) and len(found) == 5
    for silent in ("default", "plain"):
        ours = {"default": row(100.0, 0.1), "plain": row(90.0, 0.1), silent: row(0, 0, 0)}
        found = judged(module, {**ours, **peers})
        assert len(found) == 5
        assert not found["4 at once, default over plain, tokens/s"].holds
        assert found["4 at once, default over plain, tokens/s"].measured is None
        assert not found[f"4 at once, answered by {silent}"].holds
        assert found["4 at once, default over llama.cpp, tokens/s"].holds == (silent == "plain")
    none = {name: row(0, 0, 0) for name in peers}
    found = judged(module, {"default": row(100.0, 0.1), **none})
    assert len(found) == 3 and sum(gate.measured is None for gate in found.values()) == 2


def test_a_lone_client_is_judged_by_how_soon_answers_are_there(module):
    servers = {"default": row(100.0, 0.1), "plain": row(90.0, 0.1)}
    for name, seconds in (("default", 1.0), ("plain", 1.9)):
        servers[name]["latency"] = {"p50": {"value": seconds}}
    results = {"levels": [{"value": 1.0, "servers": servers}]}
    *_, sooner = module("serving").verdicts(results, "default", [])
    assert sooner.measured == pytest.approx(1.9) and sooner.holds
    servers["plain"]["latency"]["p50"]["value"] = 1.7
    *_, sooner = module("serving").verdicts(results, "default", [])
    assert not sooner.holds


def test_some_requests_without_an_answer_fail(module):
    found = judged(module, {"default": row(100.0, 0.1, answered=9), "vllm": row(50.0, 0.2)})
    assert found["4 at once, answered by default"].measured == pytest.approx(0.9)
    assert not found["4 at once, answered by default"].holds


def test_a_plan_is_judged_without_the_weights_as_well(module):
    plan = {"weights": 900, "generation": 110, "total": 1010}
    measured = {"plan": plan, "held": 900, "growth": 100, "measured": 1000, "off": 1.0}
    point = {"share": 0.35, "budget": 950, "held": 900, "growth": 55, "measured": 955, "kept": 1}
    found = {
        gate.claim: gate for gate in module("memory_plan").verdicts({"a": measured}, {"a": [point]})
    }
    assert found["largest difference of plan and peak"].holds
    bare = found["largest difference of plan and peak, without the weights"]
    assert bare.measured == pytest.approx(10.0) and not bare.holds
    assert found["largest excess of a budget"].holds
    over = found["largest excess of a budget, without the weights"]
    assert over.measured == pytest.approx(10.0) and not over.holds


def test_what_a_draft_reads_of_prompts_counts_as_the_price_of_drafting(module):
    smartspec = module("smartspec")
    engine = assemble("chain", TableLM.random(12), TableLM.random(12, seed=2), controller="fixed")
    client = smartspec.Client(engine, [[1, 2, 3, 4]] * 3, SamplingParams(max_new_tokens=6))
    told = []
    engine.listeners.append(lambda step: told.append(step.times.prefill))
    served = client.serve(1, 3)
    assert 0.0 < served.prompts <= client.reading < sum(told)
    whole = smartspec.Served()
    steps = []
    engine.listeners.append(steps.append)
    client.serve(1, 1)
    whole.add(steps[0], spent=1.0, prompts=0.25)
    assert (whole.seconds, whole.prompts) == (0.75, 0.25)


def test_loads_without_a_day_have_their_verdicts(module):
    smartspec = module("smartspec")
    rows = {"plain": 1.0, "chain[depth=1]": 0.5, "chain[controller=smartspec]": 0.4}
    log = {
        label: [smartspec.Served(10, seconds, 0.0, 10, 10, 10, 10) for _ in range(3)]
        for label, seconds in rows.items()
    }
    found = smartspec.verdicts({"1 at once": log, "4 at once": log}, list(rows)[-1], [])
    assert [gate.measured for gate in found[:3]] == pytest.approx([1.25, 1.25, 2.5])
    assert found[2].claim.startswith("4 at once: smartspec over plain")
    text = smartspec.page({"1 at once": log})
    assert "| plain | 10.0 |" in text


@pytest.mark.parametrize("rows", ["SMALL", "WIDE", "UNTRAINED", "TRAINED"])
def test_no_two_rows_of_the_demo_are_the_same_configuration(monkeypatch, rows):
    monkeypatch.syspath_prepend(str(SCRIPTS.parent / "examples"))
    shown = getattr(importlib.import_module("demo"), rows).values()
    found = [
        (name, settled(method(name), options.get("controller"), without_controller(options)))
        for name, options in shown
    ]
    assert all(one not in found[:n] for n, one in enumerate(found)), found


def without_controller(options):
    return {name: value for name, value in options.items() if name != "controller"}


def test_every_script_takes_the_options_that_the_readme_says():
    readme = (SCRIPTS / "README.md").read_text()
    listed = re.findall(r"^\| `(\w+\.py)` \|", readme, re.MULTILINE)
    [said] = re.findall(r"^(.*) have options of their own", readme, re.MULTILINE)
    exceptions = re.findall(r"`(\w+\.py)`", said)
    assert len(listed) > 30 and exceptions
    for name in listed:
        usual = "parser(description)" in (SCRIPTS / name).read_text()
        assert usual == (name not in exceptions), name
