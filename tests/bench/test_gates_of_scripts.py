"""What scripts gate: nothing that failed is left out, and nothing known flatters a figure."""

import asyncio
import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from foretoken.engine.assemble import assemble
from foretoken.errors import CapabilityError
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


def rows_of(speeds):
    """Rows whose median is plain's, and speeds of all tokens over all seconds."""
    return {
        label: {
            "failed": None, "tokens_per_second": {"value": 10.0}, "total_tokens_per_second": whole,
            "efficiency": 1.0,
            "families": {
                "code": {"speedup": {"interval": (0.1, 0.15 * whole)}},
                "lists": {"speedup": {"interval": (0.0, 0.05 * whole)}},
                "few": {"speedup": {"interval": None}},
                "late": {"speedup": None},
            },
        }
        for label, whole in speeds.items()
    }  # fmt: skip


def test_what_is_never_slower_is_judged_by_all_tokens_over_all_seconds(module):
    script = module("never_slower")
    speeds = {"plain": 10.0, "chain": 8.0, "tree": 10.0, "prompt-lookup": 10.0}
    fixed = {"chain[depth=2]": 9.0, "chain[depth=3]": 8.0, "tree[depth=6,nodes=4]": 10.0}
    useless = {"rows": rows_of(speeds), "families": ["code", "lists", "late"]}
    found = script.verdicts(useless, {"rows": rows_of(speeds | fixed)})
    held = {gate.claim: gate for gate in found}
    assert len(held) == 6
    assert held["useless draft: chain over plain"].measured == pytest.approx(0.8)
    assert not held["useless draft: chain over plain"].holds
    assert held["useless draft: tree over plain"].holds
    worst = held["worst family with a useless draft, over plain, at most: chain on lists"]
    assert worst.measured == pytest.approx(0.4) and not worst.holds
    chain = held["good draft: chain over the best fixed one, chain[depth=2]"]
    assert chain.measured == pytest.approx(8.0 / 9.0) and not chain.holds
    useless["rows"]["chain"]["failed"] = "no memory"
    for label in ("tree", "prompt-lookup"):
        useless["rows"][label]["families"] = {"few": {"speedup": {"interval": None}}}
    assert len(script.verdicts(useless, {"rows": rows_of(speeds | fixed)})) == 5


def test_peers_are_judged_by_all_tokens_over_all_seconds(module):
    speeds = {"plain": 9.0, "chain": 8.0, "chain[depth=3]": 12.0, "hf:plain": 10.0,
              "hf:assisted": 10.0}  # fmt: skip
    results = {
        "rows": rows_of(speeds), "scoring": {"nodes": [1, 16], "ratio": [1.0, 1.5]},
    }  # fmt: skip
    for label, row in results["rows"].items():
        row["peer"] = label.startswith("hf:")
    results["rows"]["hf:assisted"]["total_tokens_per_second"] = 10.5
    results["best"] = module("stage_a").fastest(results)
    assert results["best"] == {"ours": "chain[depth=3]", "peer": "hf:assisted"}
    plain, assisted, best, *_ = module("stage_a").verdicts(results)
    assert plain.measured == pytest.approx(0.9)
    assert assisted.claim.startswith("chain[depth=3] over hf:assisted")
    assert assisted.measured == best.measured == pytest.approx(12.0 / 10.5)


def test_an_answer_without_a_count_that_was_asked_for_is_not_right(module):
    mixed = module("mixed_requests")
    usage = {"stream_options": {"include_usage": True}}
    whole = {"prompt": "a", "max_tokens": 1, "stream": False}
    stream = whole | {"stream": True}
    wanted = mixed.Told((mixed.Text("b", "length"),), tokens=1, listed=1)

    def right(body, tokens, listed, alone=wanted):
        request = mixed.Request(mixed.COMPLETIONS, body)
        return mixed.agrees(request, alone, mixed.Told(wanted.texts, tokens, listed))

    assert right(stream | usage, 1, 1) and right(stream, None, 1) and right(whole, 1, 1)
    assert not right(stream | usage, None, 1) and not right(whole, None, 1)
    assert not right(stream, 2, 1) and not right(stream, None, 2)
    unlisted = mixed.Told(wanted.texts, tokens=1)  # no logarithms are asked for
    assert right(stream, None, None, unlisted)
    chunk = {"index": 0, "text": "b", "finish_reason": "length", "logprobs": None}
    said = "".join(f"data: {one}\n\n" for one in (json.dumps({"choices": [chunk]}), "[DONE]"))
    request = mixed.Request(mixed.COMPLETIONS, stream | usage | {"logprobs": 2})
    assert not mixed.agrees(request, wanted, mixed.read(request, 200, said))


def visited(module, status, *visits):
    """A tally of visits to a server that answers all of them with this status."""
    mixed, traffic = module("mixed_requests"), module("soak_traffic")
    body = {"prompt": "a", "max_tokens": 1, "temperature": 0.7, "seed": 1, "stream": False}
    wanted = mixed.Told((mixed.Text("b", "length"),), tokens=1)
    choice = {"index": 0, "text": "b", "finish_reason": "length", "logprobs": None}
    document = {"choices": [choice], "usage": {"completion_tokens": 1}}

    def answer(request):
        return httpx.Response(status, json=document, headers={"x-request-id": "7"})

    async def come():
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://nowhere") as http:
            pool = [mixed.Request(mixed.COMPLETIONS, body)]
            server = traffic.Traffic(http, pool, [wanted], 0, None, 1024)
            server.dice = SimpleNamespace(choice=lambda of: of[0], uniform=lambda low, high: 60.0)
            for name in visits:
                await server.watched(getattr(server, name))
            return server.tally

    return asyncio.run(come())


def test_a_refusal_is_no_right_answer_of_a_soak(module):
    found = visited(module, 200, "unknown", "leaves_early")
    assert found.right == {"unknown": 1, "leaves early": 1} and found.answered == ["7", "7"]
    assert visited(module, 400, "unknown").wrong == {"unknown": 1}
    assert visited(module, 500, "leaves_early").wrong == {"leaves early": 1}


def test_a_soak_takes_no_refusal_of_the_server_as_a_reference(module):
    mixed, soak = module("mixed_requests"), module("soak")
    pool = [mixed.Request(mixed.COMPLETIONS, {"prompt": "a", "stream": False})]
    transport = httpx.MockTransport(lambda request: httpx.Response(400))

    async def asked(wanted):
        async with httpx.AsyncClient(transport=transport, base_url="http://nowhere") as http:
            return await soak.references(http, pool, wanted)

    refused = mixed.Told(refused=True)
    assert asyncio.run(asked([refused])) == [refused], "a session refused it, too"
    with pytest.raises(CapabilityError, match="the server refused it"):
        asyncio.run(asked([None]))


def test_lines_of_clients_that_left_stand_for_no_answer_in_the_log_of_a_soak(module):
    lines = [{"id": str(n)} | ({"error": "client_left"} if n < 3 else {}) for n in range(10)]
    log = "".join(json.dumps(line) + "\n" for line in lines) + '{"id": "cut o'
    tally = module("soak_traffic").Tally(answered=[str(n) for n in range(10)])
    found = module("soak_server").answered(log)
    assert len(found) == 7 and tally.lacking(found) == 3
