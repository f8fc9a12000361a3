"""Many clients at once: each gets the text that it gets alone."""

import asyncio
import random

import httpx
import pytest
from live_server import wait_for

TEXTS = ("the cat is in the ", "a", "on and on and on and on", "one two three four", "é è")
METHODS = ("chain", "tree", "auto", "token-recycling")


def requests(count: int, seed: int) -> list[dict]:
    """Prompts with options, short and long, greedy and sampled, in a stream or not."""
    dice = random.Random(seed)

    def one():
        options = {
            "prompt": dice.choice(TEXTS)[: dice.randrange(1, 30)],
            "max_tokens": dice.choice((1, 5, 12, 24)),
            "temperature": dice.choice((0.0, 0.0, 0.8, 1.0)),
            "seed": dice.randrange(50),
            "stream": dice.random() < 0.5,
        }
        more = (
            {}, {"top_p": 0.9}, {"top_k": 20}, {"stop": ["e"]}, {"frequency_penalty": 0.7},
            {"repetition_penalty": 1.2}, {"logit_bias": {"70": 3.0}}, {"min_tokens": 4},
            {"speculation": False}, {"speculation": {"max_tokens": 2}}, {"logprobs": 2},
            {"include_speculation": True}, {"user": "a"}, {"priority": -1},
        )  # fmt: skip
        return {**options, **dice.choice(more)}

    return [one() for _ in range(count)]


def alone(session, asked: list[dict]) -> list[str]:
    """What the session writes for each request when there is no other."""
    known: dict[str, str] = {}
    for fields in asked:
        options = {k: v for k, v in fields.items() if k in (
            "temperature", "seed", "top_p", "top_k", "stop", "frequency_penalty",
            "repetition_penalty",
        )}  # fmt: skip
        if "logit_bias" in fields:
            options["logit_bias"] = {70: 3.0}
        if "min_tokens" in fields:
            options["min_new_tokens"] = fields["min_tokens"]
        if "speculation" in fields:
            options["guesses"] = fields["speculation"] and fields["speculation"]["max_tokens"]
            options["guesses"] = int(options["guesses"])
        prompt, most = fields["prompt"], fields["max_tokens"]
        key = repr((prompt, most, sorted(options.items())))
        if key not in known:
            known[key] = session.generate(prompt, most, **options).text
        fields["wanted"] = known[key]
    return [fields.pop("wanted") for fields in asked]


async def ask(client, gate, fields: dict) -> str:
    """The text of one request."""
    import json

    async with gate:
        told = await client.post("/v1/completions", json=fields)
    assert told.status_code == 200, told.text
    if not fields["stream"]:
        return told.json()["choices"][0]["text"]
    lines = [line[6:] for line in told.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


async def ask_all(url: str, asked: list[dict], together: int) -> list[str]:
    gate = asyncio.Semaphore(together)
    limits = httpx.Limits(max_connections=together)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
        return await asyncio.gather(*(ask(client, gate, fields) for fields in asked))


def compare(make_session, running, method: str, count: int) -> None:
    asked = requests(count, seed=count)
    with make_session(method, max_rows=8) as session:
        wanted = alone(session, asked)
        with running(session) as server:
            got = asyncio.run(ask_all(server.url, asked, together=32))
            wait_for(lambda: session.engine.idle and server.service.places == 0)
            assert server.metric("queue_length") == server.metric("running_rows") == 0
            assert not server.service.answers
        wrong = [fields for fields, a, b in zip(asked, got, wanted, strict=True) if a != b]
        assert not wrong and session.engine.idle
        assert session.target.rows_held == 0


@pytest.mark.parametrize("method", METHODS)
def test_mixed_requests_of_many_clients_get_their_own_texts(make_session, running, method) -> None:
    compare(make_session, running, method, 32)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_five_hundred_requests_get_their_own_texts(make_session, running, method) -> None:
    compare(make_session, running, method, 500)


def test_two_hundred_clients_at_once_wait_or_are_told_to_come_back(make_session, running) -> None:
    """No request is lost: each is answered, or refused with a time to come back."""
    fields = {"prompt": "the cat", "max_tokens": 12, "temperature": 0}

    async def all_of_them(url):
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:
            calls = (client.post("/v1/completions", json=fields) for _ in range(200))
            return await asyncio.gather(*calls)

    with make_session("chain", max_rows=4) as session:
        wanted = session.generate("the cat", 12, temperature=0.0).text
        with running(session, queue=30) as server:
            told = asyncio.run(all_of_them(server.url))
            assert server.get("/health").status_code == 200
    good = [one for one in told if one.status_code == 200]
    refused = [one for one in told if one.status_code == 429]
    assert len(good) + len(refused) == 200 and len(good) >= 34 and refused
    assert {one.json()["choices"][0]["text"] for one in good} == {wanted}
    for one in refused:
        assert one.json()["error"]["code"] == "queue_full" and int(one.headers["retry-after"]) >= 1
