"""The description of the server holds what it does, and no body at all makes it fail or hang."""

import asyncio
import json

import httpx
import jsonschema
import pytest
from live_server import wait_for
from pydantic import BaseModel

from foretoken.serve import app

GOOD = {"prompt": "a", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
ENDPOINTS = {
    (TEXTS, "post"), (CHATS, "post"), ("/v1/models", "get"), ("/v1/models/{name}", "get"),
    ("/health", "get"),
}  # fmt: skip
SECONDS = 20.0  # within which everything is answered
FIELDS = (
    "model max_tokens n stream stream_options temperature top_p stop seed presence_penalty "
    "frequency_penalty logit_bias user response_format prediction top_k min_p repetition_penalty "
    "min_tokens ignore_eos priority guided_json guided_regex guided_choice "
    "structured_outputs speculation "
    "include_speculation"
).split()
VALUES = [
    [], {}, "", 0, -1, True, 2**63, [[[]]], {"a": {"b": [None]}}, -(10**30), 1e300,
    "\u0000\U0001f600",
]  # fmt: skip


REFUSED = {  # further fields of a completion that are refused
    "prompt of odd things": {"prompt": ["a", 1, None, {}]},
    "prompt of lists of texts": {"prompt": [["a"]]},
    "prompt of truth values": {"prompt": [[True]]},
    "prompt of a number": {"prompt": 2**70},
    "prompt of huge ids": {"prompt": [2**63 - 1]},
    "prompt of many texts": {"prompt": ["a"] * 5000},
    "n of 1e9": {"n": 10**9},
    "stop without a text": {"stop": ["a", ""]},
    "stop of nothing": {"stop": [None]},
    "stop of very much": {"stop": ["a", "x" * 100_000]},
    "bias of a word": {"logit_bias": {"the": 1}},
    "bias of an empty key": {"logit_bias": {"": 1}},
    "bias of a key with a sign": {"logit_bias": {"-1": 1}},
    "bias of other digits": {"logit_bias": {"\u0663": 1}},
    "bias of a long key": {"logit_bias": {"9" * 5000: 1}},
    "bias of nothing": {"logit_bias": {"5": None}},
    "bias beyond numbers": {"temperature": 1, "logit_bias": {"5": 1e308}},
    "penalties beyond numbers": {"temperature": 1, "frequency_penalty": -1e308},
    "temperature next to nothing": {"temperature": 5e-324},
    "temperature and nucleus next to nothing": {"temperature": 1e-310, "top_p": 1e-310},
    "speculation of a number": {"speculation": 0},
    "regex that is none": {"guided_regex": "("},
    "regex without a text": {"guided_regex": "[^\\s\\S]"},
    "regex that looks back": {"guided_regex": "(a)\\1"},
    "regex nested deeply": {"guided_regex": "(" * 10_000},
    "choice of nothing": {"guided_choice": []},
    "choice of no text": {"guided_choice": [""]},
    "schema that is no JSON": {"guided_json": "{"},
    "schema that is a list": {"guided_json": "[]"},
    "schema of a list nested deeply": {"guided_json": "[" * 100_000},
    "schema nested deeply": {"guided_json": '{"a":' * 100_000},
    "schema of no number": {"guided_json": '{"const": NaN}'},
    "schema of half a character": {"guided_json": '{"const": "\\ud800"}'},
    "schema of huge digits": {"guided_json": '{"maximum": ' + "9" * 5000 + "}"},
    "schema of no type": {"guided_json": {"type": "nope"}},
    "schema from elsewhere": {"guided_json": {"$ref": "http://localhost:1/x"}},
    "schema that refers to nothing": {"guided_json": {"$ref": "#/nowhere"}},
    "schema without a value": {"guided_json": {"enum": []}},
    "schema of a wrong pattern": {"guided_json": {"type": "string", "pattern": "("}},
    "form of a schema without one": {"response_format": {"type": "json_schema"}},
    "prediction of nothing": {"prediction": {"content": None}},
    "model by another name": {"model": "\u0000" * 5000},
}
ODD = {  # that are answered
    "temperature like none": {"temperature": 1e-30},
    "temperature like fire": {"temperature": 1e308},
    "nucleus next to nothing": {"temperature": 1, "top_p": 5e-324, "n": 4},
    "nucleus and floor next to nothing": {"temperature": 1, "top_p": 1e-310, "min_p": 1.0},
    "seeds at the end": {"temperature": 1, "seed": 2**63 - 1, "n": 2},
    "seeds at the beginning": {"temperature": 1, "seed": -(2**63), "n": 2},
    "many texts": {"n": 128},
    "top k of everything": {"temperature": 1, "top_k": 2**31 - 1},
    "stop of unicode": {"stop": ["\U0001f600", "\u0000", "\ud7ff", "x" * 1024]},
    "bias against everything": {"logit_bias": {str(i): -100 for i in range(256)}},
    "bias twice": {"logit_bias": {"05": 1, "5": 3}},
    "ids of special tokens": {"prompt": [[256], [257]], "echo": True},
    "prompt without a letter": {"prompt": "\u0000"},
    "a grammar and a ban of all of it": {"guided_choice": ["ab"], "logit_bias": {"64": -100}},
    "regex with no end": {"guided_regex": "(.*.*)*x"},
    "choice of odd characters": {"guided_choice": ["\U0001f600", '"\\', "\u2028\n"]},
    "prediction of very much": {"prediction": {"content": "a" * 100_000}},
    "names of nothing": {"\u0000": 1, "\u00e9": 2, "x" * 10_000: 3},
}
CHATS_REFUSED = {
    "no list": "hi", "an object": {}, "lists": [[]], "nothing": [None], "empty": [],
    "no role": [{"content": "a"}], "role of a number": [{"role": 5, "content": "a"}],
    "empty beginning": [{"role": "assistant", "content": ""}],
    "content of nothing": [{"role": "user", "content": None}],
    "content without parts": [{"role": "user", "content": []}],
    "content of a number": [{"role": "user", "content": 5}],
    "content of an object": [{"role": "user", "content": {"text": "a"}}],
    "content of a picture": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}],
    "content of empty parts": [{"role": "user", "content": [{"type": "text"}]}],
    "a call": [{"role": "assistant", "tool_calls": [{"id": "a"}]}],
    "very many": [{"role": "user", "content": "a"}] * 3000,
    "a role like a book": [{"role": "x" * 100_000, "content": "a"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def limited(make_session, running):
    """A server with a limit of tokens, as it would stand before strangers."""
    with (
        make_session("chain", controller="fixed", depth=4) as session,
        running(session, max_tokens_limit=16) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def ask(limited):
    """Posts a body, with one connection for all: `ask(path, fields or bytes)`."""
    with httpx.Client(base_url=limited.url, timeout=SECONDS) as client:

        def asked(path, body):
            sent = {"content": body} if isinstance(body, bytes) else {"json": body}
            return client.post(path, **sent)

        yield asked


def is_error(told: httpx.Response) -> bool:
    """An error of the client's in OpenAI's form, of a length that a log can bear."""
    error = told.json()["error"]
    named = set(error) == {"message", "type", "param", "code"}
    return named and 400 <= told.status_code < 500 and 0 < len(error["message"]) < 2000


def references(part) -> set[str]:
    """All places that a document refers to."""
    if isinstance(part, list):
        return set().union(*map(references, part))
    if not isinstance(part, dict):
        return set()
    own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
    return own.union(*map(references, part.values()))


def test_the_description_is_whole(limited) -> None:
    """Every endpoint is in it, and what it refers to is there."""
    schema = limited.get("/openapi.json").json()
    calls = {(path, verb) for path, verbs in schema["paths"].items() for verb in verbs}
    assert calls == ENDPOINTS and schema["openapi"].startswith("3.1")
    assert references(schema)
    for place in references(schema):
        found = schema
        for step in place.removeprefix("#/").split("/"):
            found = found[step]
    for path, verb in calls:
        call = schema["paths"][path][verb]
        assert call["summary"] and all(one["description"] for one in call["responses"].values())
    bodies = schema["components"]["schemas"]
    for name in FIELDS:
        assert (
            name in bodies["ChatRequest"]["properties"]
            and name in (bodies["CompletionRequest"]["properties"])
        )


def test_the_description_is_a_schema_by_its_own_rules(limited) -> None:
    for part in limited.get("/openapi.json").json()["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(part)


class Note(BaseModel):
    """The body of a route that somebody added."""

    text: str


def test_own_routes_of_an_application_are_described_beside_ours(make_session) -> None:
    """Also one that comes after the description was read."""

    async def looked_at(*paths: str) -> list[httpx.Response]:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [await client.get(path) for path in paths]

    async def mine() -> list[int]:
        return []

    async def noted(note: Note) -> Note:
        return note

    async def numbers(more: list[int]) -> None:
        return None

    with make_session("plain") as session:
        api = app(session)
        api.post("/notes")(noted)
        api.post("/numbers")(numbers)
        for added in ("/mine", "/late"):
            api.get(added, status_code=201)(mine)
            for _ in range(2):
                described, page = asyncio.run(looked_at("/openapi.json", "/docs"))
                assert described.status_code == page.status_code == 200
                schema = described.json()
                places = {one.rpartition("/")[2] for one in references(schema)}
                assert {"ChatRequest", "Note"} <= places <= set(schema["components"]["schemas"])
                assert schema["paths"]["/mine"]["get"]["responses"]["201"]["content"]
                assert "POST /notes" in page.text and "POST /numbers" in page.text


def test_every_status_that_is_sent_is_described(make_session, running) -> None:
    with (
        make_session("chain", controller="fixed") as session,
        running(session, api_keys=("one",)) as server,
    ):
        paths = server.get("/openapi.json").json()["paths"]
        for path, verb in sorted(ENDPOINTS):
            told = httpx.request(verb, server.url + path.format(name="tiny"), timeout=SECONDS)
            assert str(told.status_code) in paths[path][verb]["responses"], (path, told.text)
        server.service.stopping = True
        told = server.get("/health")
        assert told.status_code == 503
        described = paths["/health"]["get"]["responses"]["503"]["content"]["application/json"]
        assert described["schema"] == paths["/health"]["get"]["responses"]["200"]["content"][
            "application/json"]["schema"]  # fmt: skip
        server.service.stopping = False


@pytest.mark.parametrize(
    ("path", "odd"),
    [(path, odd) for path in (TEXTS, CHATS) for odd in REFUSED
     if path == TEXTS or "prompt" not in REFUSED[odd]],
)  # fmt: skip
def test_nasty_bodies_are_refused(ask, path, odd) -> None:
    fields = {**(GOOD if path == TEXTS else CHAT), **REFUSED[odd]}
    assert is_error(ask(path, fields))


@pytest.mark.parametrize("odd", ODD)
def test_odd_bodies_are_answered(ask, odd) -> None:
    told = ask(TEXTS, {**GOOD, **ODD[odd]})
    assert told.status_code == 200, told.text
    assert all(one["finish_reason"] for one in told.json()["choices"])


@pytest.mark.parametrize("odd", CHATS_REFUSED)
def test_odd_messages_are_refused(ask, odd) -> None:
    assert is_error(ask(CHATS, {**CHAT, "messages": CHATS_REFUSED[odd]}))


@pytest.mark.parametrize("name", FIELDS)
def test_no_value_of_a_field_is_too_much(ask, name) -> None:
    """Null is as good as left out; what no field can be is refused or passed over, at once."""
    for path, good in ((TEXTS, GOOD), (CHATS, CHAT)):
        assert ask(path, {**good, name: None}).status_code == 200
        for value in VALUES:
            told = ask(path, {**good, name: value})
            assert told.status_code == 200 or is_error(told), (value, told.text)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "guided_json": {"const": NaN}}', b'{"prompt": "\\ud800"}',
        b'{"\\udfff": 1, "prompt": "a"}', b"\xef\xbb\xbf{}", b"[" * 100_000, b'"' + b"a" * 100_000,
        b'{"prompt": "a", "metadata": ' + b'{"a":' * 50_000, json.dumps(GOOD).encode("utf-16"),
    ],
    ids=range(12),
)  # fmt: skip
def test_nasty_bytes_are_refused(ask, body) -> None:
    for path in (TEXTS, CHATS):
        assert is_error(ask(path, body))


def test_nothing_is_left_of_all_this(limited, ask) -> None:
    """Whatever was asked before, in this module: no fault was counted, and nothing is held."""
    fields = {**GOOD, "max_tokens": 12}
    wanted = limited.session.generate(GOOD["prompt"], 12, temperature=0.0).text
    assert ask(TEXTS, fields).json()["choices"][0]["text"] == wanted
    wait_for(lambda: limited.session.engine.idle and limited.service.places == 0)
    assert limited.metric("engine_errors_total") == 0 == limited.metric("drafter_errors_total")
    assert limited.session.target.rows_held == 0 and not limited.service.answers
