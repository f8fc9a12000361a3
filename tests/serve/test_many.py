"""Many clients at once, with all that a request may ask for: each gets what it gets alone."""

import asyncio
from collections import Counter
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from live_server import DENSE, wait_for
from mixed_requests import CHATS, agrees, alone, ask, mixed

import foretoken
from foretoken import minis
from foretoken.audit.fixtures import random_head
from foretoken.coins import SeededCoins
from foretoken.minis.tasks import FAMILIES, examples
from foretoken.training.heads import run_training
from foretoken.training.objectives.unrolled import UnrolledTraining

WORDS = ("the cat is in the ", "a", "on and on and on and on", "one two three four", "é è", "in")
SHORT = [("words", text, "the other one") for text in WORDS]
HEAD = "auto-eagle3"  # the default with a trained head
METHODS = ("chain", "tree", "auto", "token-recycling", HEAD, "eqspec", "exspec")
ROUNDING = 5e-6  # of probabilities, by the company that a row has in a forward
ALONE = 4  # the first requests are also written by the server when it has nothing else to do


async def ask_all(url: str, asked, together: int) -> list:
    """All answers, in order, with so many requests under way."""
    gate = asyncio.Semaphore(together)
    limits = httpx.Limits(max_connections=together)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as client:

        async def one(request):
            async with gate:
                return await ask(client, request)

        return await asyncio.gather(*map(one, asked))


@contextmanager
def near_ties():
    """Tells how near to another outcome the coins came that were used inside."""
    draw, flip, nearest = SeededCoins.draw, SeededCoins.flip, [1.0]

    def next_of(coins):
        if not coins._ahead:
            coins._ahead.append(coins._random.random())
        return coins._ahead[0]

    def drawn(coins, law):
        total = law.double().cumsum(0)
        nearest.append(float((total - next_of(coins) * total[-1]).abs().min()))
        return draw(coins, law)

    def flipped(coins, p):
        nearest.append(abs(next_of(coins) - p))
        return flip(coins, p)

    SeededCoins.draw, SeededCoins.flip = drawn, flipped
    try:
        yield lambda: min(nearest)
    finally:
        SeededCoins.draw, SeededCoins.flip = draw, flip


def compare(session, running, asked) -> None:
    """Texts, ends and counts of a server are those that its session writes one by one.

    A coin that falls on a boundary of the law, up to the rounding of a batch, tells nothing.
    """
    wanted, ties = [], []
    for request in asked:
        with near_ties() as nearest:
            wanted.append(alone(session, request))
        ties.append(nearest() < ROUNDING)
    assert sum(ties) <= max(2, 0.1 * len(asked))
    with running(session) as server:
        got = asyncio.run(ask_all(server.url, asked, together=32))
        wait_for(lambda: session.engine.idle and server.service.places == 0)
        assert server.metric("queue_length") == server.metric("running_rows") == 0
        assert not server.service.answers and session.target.rows_held == 0
        assert server.metric("engine_errors_total") == server.metric("drafter_errors_total") == 0
        quiet = asyncio.run(ask_all(server.url, asked[:ALONE], together=1))
    wrong = [
        (request.path, request.body, told, right)
        for request, told, right, tie in zip(asked, got, wanted, ties, strict=True)
        if not tie and not agrees(request, right, told)
    ]
    assert not wrong, f"{len(wrong)} of {len(asked)}: {wrong[:3]}"
    first = zip(asked[:ALONE], wanted[:ALONE], quiet, ties[:ALONE], strict=True)
    assert all(tie or agrees(request, right, told) for request, right, told, tie in first)
    refused = [request.body for request, right in zip(asked, wanted, strict=True) if right.refused]
    assert not refused, "every option is one that every method takes"


def covered(asked) -> None:
    """Whether the requests are as mixed as they are meant to be."""
    fields = Counter(name for request in asked for name in request.body)
    named = (
        "top_p top_k min_p stop frequency_penalty presence_penalty repetition_penalty logit_bias "
        "min_tokens ignore_eos logprobs n echo speculation include_speculation prediction user "
        "priority stream_options guided_json guided_regex guided_choice response_format"
    ).split()
    assert all(fields[name] >= 3 for name in named), fields
    assert {request.body["temperature"] for request in asked} == {0.0, 0.7, 1.0}
    assert {request.body["stream"] for request in asked} == {True, False}
    assert 0.2 < sum(request.path == CHATS for request in asked) / len(asked) < 0.6


@pytest.fixture(scope="module")
def tiny(make_session, make_llama, byte_tokenizer, chatty):
    """Opens sessions over tiny models, with a head that knows nothing: `tiny(method)`."""

    def make(method: str):
        if method != HEAD:
            return make_session(method, max_rows=8)
        vocab = len(byte_tokenizer)
        target = make_llama(vocab, num_hidden_layers=4, eos_token_id=byte_tokenizer.eos_token_id)
        head = random_head("eagle3", vocab, 64)
        return foretoken.load(target, HEAD, None, chatty, draft_head=head, max_rows=8, **DENSE)

    return make


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A head for the shipped target, which began as the shipped draft and then heard the target."""
    out = tmp_path_factory.mktemp("head")
    with foretoken.load(minis.path("text-target"), method="plain", dtype="float32") as session:

        def prompts(split: str, count: int):
            found = [examples(family, split, count)[0].prompt for family in FAMILIES]
            found = [session.tokenizer(text)["input_ids"] for text in found]
            return [found[i % len(found)] for i in range(count)]

        config = UnrolledTraining(
            prompts=12, new_tokens=48, window=32, steps=12, batch=4, start="text-draft",
            rate=1e-4, matrix_rate=1e-3, embedding_rate=0.0, seed=0,
        )  # fmt: skip
        run_training(session, "eagle3", prompts, config, out, show=False)
    return out


@pytest.fixture
def mini(request):
    """Opens sessions over the shipped pair, or its target with a head: `mini(method)`."""

    def make(method: str):
        told = {"draft": minis.path("text-draft")}
        if method == HEAD:
            told = {"draft_head": request.getfixturevalue("head")}
        where = minis.path("text-target")
        return foretoken.load(where, method, dtype="float32", max_rows=16, **told)

    return make


def tasks(each: int) -> list[tuple[str, str, str]]:
    """Prompts of six families with good answers, held out."""
    found = [(family, examples(family, "test", each, seed=3)) for family in FAMILIES]
    return [(family, one.prompt, one.answer) for family, those in found for one in those]


@pytest.mark.parametrize("method", METHODS)
def test_mixed_requests_of_many_clients_get_their_own_texts(tiny, running, method) -> None:
    with tiny(method) as session:
        compare(session, running, mixed(32, METHODS.index(method), SHORT, guided=0.2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", METHODS)
def test_five_hundred_requests_get_their_own_texts(mini, running, method) -> None:
    most = (1, 4, 12, 24, 48)
    asked = mixed(500, 100 + METHODS.index(method), [*tasks(12), *SHORT], most=most)
    covered(asked)
    with mini(method) as session:
        compare(session, running, asked)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["chain", "auto"])
def test_five_hundred_guided_requests_get_their_own_texts(mini, running, method) -> None:
    asked = mixed(500, 200, [*tasks(6), *SHORT], guided=1.0)
    with mini(method) as session:
        compare(session, running, asked)


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


def test_a_key_that_fills_its_queue_keeps_no_other_out(make_session, running) -> None:
    body = {"prompt": "on", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        make_session("plain", max_rows=1) as session,
        running(session, queue=1, api_keys=("a", "b")) as server,
        ExitStack() as open_,
    ):
        first, second = (
            open_.enter_context(
                httpx.Client(
                    base_url=server.url, timeout=60.0, headers={"authorization": f"Bearer {key}"}
                )
            )
            for key in "ab"
        )
        for _ in range(2):
            asked = first.stream("POST", "/v1/completions", json=body)
            assert open_.enter_context(asked).status_code == 200
        short = {"prompt": "on", "max_tokens": 1}
        full = first.post("/v1/completions", json=short)
        assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full"
        assert second.post("/v1/completions", json=short).status_code == 200
