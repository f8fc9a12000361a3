"""Which conversation a request goes on with, and what is said in the place of a replica."""

import asyncio
import json

import pytest

from foretoken.serve.affinity import HEADER, LONGEST, REPLICA, Affinity, conversation, middlewares

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "Hello"}
TURNS = [SYSTEM, FIRST, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Why?"}]


def key(**fields):
    return conversation(json.dumps(fields).encode())


def test_all_turns_of_a_chat_have_one_name() -> None:
    assert key(messages=TURNS[:2]) == key(messages=TURNS, max_tokens=9) == key(messages=TURNS[:3])
    assert key(messages=TURNS[:2]) != key(messages=[SYSTEM, {"role": "user", "content": "Bye"}])
    assert key(messages=[SYSTEM]) is not None


def test_prompts_that_begin_alike_have_one_name() -> None:
    long = "a rule " * 100
    assert key(prompt=long + "x") == key(prompt=[long + "y", "z"]) != key(prompt="b" + long)
    assert key(prompt=[1, 2, 3]) == key(prompt=[[1, 2, 3]]) != key(prompt=[1, 2])


def test_a_user_has_conversations_of_their_own_and_more_than_one() -> None:
    """A program that sends one `user` for all of its requests has all replicas."""
    ann = key(user="ann", messages=TURNS)
    assert ann == key(user="ann", messages=TURNS[:2]) != key(user="bob", messages=TURNS)
    assert ann != key(user="ann", messages=[SYSTEM, {"role": "user", "content": "Bye"}])
    assert key(user="ann") is None and key(user=3, prompt="a") == key(prompt="a")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"3",
        b"{}",
        b'{"prompt": 3}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
    ],
)
def test_what_cannot_be_read_has_no_name(body) -> None:
    assert conversation(body) is None


def ask(answer, body, headers=(), path="/v1/completions", pieces=3, said=b"said"):
    """What an application behind Affinity sees, and what the client does."""
    size = -(-len(body) // pieces) or 1
    parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    waiting = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
        for number, part in enumerate(parts)
    ]
    seen, sent = {}, []

    async def receive():
        return waiting.pop(0)

    async def send(message):
        sent.append(message)

    async def inner(scope, receive, send):
        seen.update(scope, body=b"")
        more = True
        while more:
            message = await receive()
            seen["body"] += message["body"]
            more = message["more_body"]
        await send({"type": "http.response.start", **answer})
        await send({"type": "http.response.body", "body": said})

    scope = {"type": "http", "path": path, "headers": list(headers)}
    asyncio.run(Affinity(inner)(scope, receive, send))
    return seen, sent


OK = {"status": 200, "headers": [(b"x-request-id", b"a"), (REPLICA, b"r"), (b"X-Request-ID", b"b")]}


def test_the_body_passes_whole_and_its_conversation_is_named() -> None:
    body = json.dumps({"prompt": "one two three"}).encode()
    seen, sent = ask(OK, body)
    assert seen["body"] == body and dict(seen["headers"])[HEADER] == conversation(body).encode()
    assert sent[0]["headers"] == OK["headers"][:2] and sent[1]["body"] == b"said"
    large = b'{"prompt": "' + b"x" * (2 * LONGEST) + b'"}'
    seen, _ = ask(OK, large, pieces=20)
    assert seen["body"] == large and HEADER not in dict(seen["headers"])


def test_a_name_that_was_sent_stands() -> None:
    seen, _ = ask(OK, b'{"prompt": "a"}', headers=[(HEADER, b"mine")])
    assert seen["headers"] == [(HEADER, b"mine")] and seen["body"] == b'{"prompt": "a"}'
    seen, _ = ask(OK, b"", path="/health")
    assert seen["headers"] == []


@pytest.mark.parametrize(
    ("status", "said", "told", "code"),
    [
        (500, b"", 503, "replica_lost"),
        (503, b"Request dropped due to backpressure (num_queued_requests=2).", 429, "queue_full"),
        (503, b"Deployment is unavailable because it failed to deploy.", 503, "unavailable"),
        (404, b"no such path", 503, "stopping"),
    ],
)
def test_what_the_router_says_is_told_as_clients_read_it(status, said, told, code) -> None:
    _, sent = ask({"status": status, "headers": []}, b"{}", said=said)
    assert len(sent) == 2 and sent[0]["status"] == told
    assert json.loads(sent[1]["body"])["error"]["code"] == code
    assert b"retry-after" in dict(sent[0]["headers"])


def test_errors_of_a_replica_pass_as_they_are() -> None:
    _, sent = ask({"status": 500, "headers": [(REPLICA, b"r")]}, b"{}")
    assert sent[0]["status"] == 500 and sent[1]["body"] == b"said"


def passed_through(inner) -> list[dict]:
    """What reaches a client of what the router sends in answer to an empty request."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    asyncio.run(Affinity(inner)(scope, receive, send))
    return sent


@pytest.mark.parametrize("begun", [False, True])
def test_a_replica_that_goes_is_told_where_nothing_was_sent(begun) -> None:

    async def inner(scope, receive, send):
        if begun:
            await send({"type": "http.response.start", **OK})

    sent = passed_through(inner)
    if begun:
        assert [message["status"] for message in sent] == [200]  # half an answer stays one
    else:
        assert sent[0]["status"] == 503 and b"replica_lost" in sent[1]["body"]


@pytest.mark.parametrize("over", [False, True])
def test_a_stream_that_is_cut_ends_with_an_error_as_its_last_event(over) -> None:
    """The router leaves it open where the replica died; one that is whole gets nothing added."""
    events = [(b"Content-Type", b"text/event-stream; charset=utf-8"), *OK["headers"]]

    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": events})
        body = {"type": "http.response.body", "body": b"data: 1\n\n"}
        await send({**body, "more_body": True})
        if over:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    sent = passed_through(inner)
    assert len(sent) == 3 and not sent[-1].get("more_body", False)
    last = sent[-1]["body"].decode()
    assert last.endswith("data: [DONE]\n\n")
    if not over:
        error = json.loads(last.splitlines()[0].removeprefix("data: "))["error"]
        assert error["code"] == "replica_lost"


def test_proxies_load_it_by_name() -> None:
    assert [one.cls for one in middlewares()] == [Affinity]
