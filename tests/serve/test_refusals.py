"""What cannot be answered is refused as OpenAI's clients read it; a user's input is never a 500."""

import copy
import json
import pickle

import httpx
import openai
import pytest
from pydantic import ValidationError

from foretoken import errors
from foretoken.cli.serve import keys
from foretoken.engine.requests import SAMPLING
from foretoken.errors import ConfigError, ForetokenError
from foretoken.serve import Settings, app
from foretoken.serve.wire.errors import Refusal
from foretoken.serve.wire.requests import ChatRequest, CompletionRequest
from foretoken.serve.wire.unsupported import LOOKED_AT, check_fields, check_reading, words_of

GOOD = {"prompt": "a", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
MALFORMED = [
    b"", b"{", b"null", b"[]", b"1", b'"a"', b"\xff\xfe", b'{"prompt": "a"', b"{'prompt': 'a'}",
    b'{"prompt": "\\ud800"}', b'{"prompt": ' + b"[" * 5000, b'{"prompt": "a", "temperature": NaN}',
]  # fmt: skip
WRONG = [
    ({}, "prompt"),
    ({"prompt": ""}, None),
    ({"prompt": []}, None),
    ({"prompt": [[]]}, None),
    ({"prompt": ["a", ""]}, None),
    ({"prompt": [10**9]}, None),
    ({"prompt": [-1]}, None),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "z" * 5000}, None),
    ({**GOOD, "max_tokens": 0}, "max_tokens"),
    ({**GOOD, "max_tokens": "5"}, "max_tokens"),
    ({**GOOD, "max_tokens": 10**30}, "max_tokens"),
    ({**GOOD, "temperature": -0.1}, "temperature"),
    ({**GOOD, "top_p": 0}, "top_p"),
    ({**GOOD, "n": 0}, "n"),
    ({**GOOD, "n": 10**6}, "n"),
    ({**GOOD, "seed": 10**40}, "seed"),
    ({**GOOD, "stop": [""]}, None),
    ({**GOOD, "stop": ["a"] * 99}, "stop"),
    ({**GOOD, "stop": "a" * 1025}, "stop"),
    ({**GOOD, "stop": ["a", "b" * 1025]}, "stop"),
    ({**GOOD, "logit_bias": {"x": 1}}, "logit_bias"),
    ({**GOOD, "logit_bias": {"99999": 1}}, None),
    ({**GOOD, "logit_bias": [1]}, "logit_bias"),
    ({**GOOD, "logprobs": 99}, "logprobs"),
    ({**GOOD, "echo": True, "logprobs": 1}, "echo"),
    ({**GOOD, "top_logprobs": 2}, "top_logprobs"),
    ({**GOOD, "suffix": "b"}, "suffix"),
    ({**GOOD, "best_of": 4}, "best_of"),
    ({**GOOD, "temprature": 1}, "temprature"),
    ({**GOOD, "topk": 1}, "topk"),
    ({**GOOD, "speculation": {"max_tokens": -1}}, "speculation"),
    ({**GOOD, "speculation": {"depth": 1}}, "speculation"),
    ({**GOOD, "user": 5}, "user"),
    ({**GOOD, "guided_regex": "a+", "guided_choice": ["a"]}, "response_format"),
    ({**GOOD, "response_format": {"type": "xml"}}, "response_format"),
    ({**GOOD, "structured_outputs": {"grammar": "start: x"}}, "structured_outputs"),
    ({**GOOD, "allowed_token_ids": [5]}, "allowed_token_ids"),
    ({**GOOD, "bad_words": ["a"]}, "bad_words"),
    ({**GOOD, "prompt_logprobs": 0}, "prompt_logprobs"),
    ({**GOOD, "return_token_ids": True}, "return_token_ids"),
    ({**GOOD, "return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ({**GOOD, "logprob_token_ids": [5]}, "logprob_token_ids"),
    ({**GOOD, "cache_salt": "mine"}, "cache_salt"),
    ({**GOOD, "prompt": [5, 6, 7], "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ({**GOOD, "stop": "a", "include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({**GOOD, "add_special_tokens": False}, "add_special_tokens"),
    ({**GOOD, "skip_special_tokens": False}, "skip_special_tokens"),
]
WRONG_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [*CHAT["messages"], {"role": "assistant", "content": ""}]}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools"),
    ({**CHAT, "functions": [{"name": "f"}]}, "functions"),
    ({**CHAT, "audio": {"voice": "x"}}, "audio"),
    ({**CHAT, "modalities": ["text", "audio"]}, "modalities"),
    ({**CHAT, "top_logprobs": 3}, "top_logprobs"),
    ({**CHAT, "echo": True}, "echo"),
    ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format"),
    ({**CHAT, "chat_template": "{{ messages }}"}, "chat_template"),
    ({**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({**CHAT, "add_special_tokens": True}, "add_special_tokens"),
    ({**CHAT, "add_generation_prompt": False}, "add_generation_prompt"),
    ({**CHAT, "continue_final_message": True}, "continue_final_message"),
]
OWN_TURN = {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "ho"}]}
NEUTRAL = [  # what is done anyway
    ("/v1/completions", {**GOOD, "add_special_tokens": True, "truncate_prompt_tokens": 999,
                         "skip_special_tokens": True, "top_logprobs": 0}),
    ("/v1/completions", {**GOOD, "prompt": [5, 6], "add_special_tokens": False}),
    ("/v1/completions", {**GOOD, "allowed_token_ids": None, "bad_words": [],
                         "include_stop_str_in_output": True, "chat_template": "x"}),
    ("/v1/chat/completions", {**CHAT, "chat_template": None, "chat_template_kwargs": {"no_such": 1},
                              "add_special_tokens": False, "add_generation_prompt": True,
                              "continue_final_message": False, "echo": False}),
    ("/v1/chat/completions", {**OWN_TURN, "add_generation_prompt": False,
                              "continue_final_message": True}),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": ""}]}),
    ("/v1/chat/completions", {**CHAT, "messages": [*CHAT["messages"],
                                                   {"role": "tool", "content": ""}]}),
    ("/v1/completions", {**GOOD, "prompt_logprobs": None, "return_token_ids": False,
                         "logprob_token_ids": [], "stop": "x" * 1024, "cache_salt": None,
                         "stream_options": {"continuous_usage_stats": True}}),
    ("/v1/chat/completions", {**CHAT, "reasoning_effort": "high", "documents": [{"text": "a"}]}),
]  # fmt: skip
LONG_AND_WRONG = [  # of each, what makes a body of megabytes
    (CompletionRequest, {"prompt": [None] * 50_000}),
    (CompletionRequest, {"prompt": [[None] * 50_000] * 2}),
    (CompletionRequest, {**GOOD, "guided_choice": [1] * 50_000}),
    (CompletionRequest, {**GOOD, "stop": [1] * 50_000}),
    (CompletionRequest, {**GOOD, "structured_outputs": {"choice": [1] * 50_000}}),
    (CompletionRequest, {**GOOD, "logit_bias": {str(n): None for n in range(50_000)}}),
    (CompletionRequest, {**GOOD, "speculation": {str(n): 1 for n in range(50_000)}}),
    (CompletionRequest, {**GOOD, "prediction": {"content": [{}] * 50_000}}),
    (ChatRequest, {"messages": [None] * 50_000}),
    (ChatRequest, {"messages": [{"role": "user", "content": [None] * 50_000}]}),
]


def checked(told: httpx.Response, status: int = 400) -> dict:
    """The error of a response, in OpenAI's form."""
    assert told.status_code == status, told.text
    error = told.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 2000
    return error


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_json_is_refused(served, body) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        checked(served.post(path, content=body))


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[str(f)[:50] for f, _ in WRONG])
def test_wrong_completions_are_refused_by_name(served, fields, param) -> None:
    error = checked(served.post("/v1/completions", json=fields))
    if param is not None:
        assert error["param"].startswith(param)
    checked(served.post("/v1/completions", json={**fields, "stream": True}))


@pytest.mark.parametrize(
    ("fields", "param"), WRONG_CHATS, ids=[str(f)[:50] for f, _ in WRONG_CHATS]
)
def test_wrong_chats_are_refused_by_name(served, fields, param) -> None:
    error = checked(served.post("/v1/chat/completions", json=fields))
    if param is not None:
        assert error["param"].startswith(param)


def test_an_answer_that_has_not_begun_is_refused_in_the_words_of_a_session(served) -> None:
    empty = {"role": "assistant", "content": ""}
    asked = {**CHAT, "messages": [*CHAT["messages"], empty]}
    error = checked(served.post("/v1/chat/completions", json=asked))
    assert error["param"] == "messages" and "is an empty one of the assistant's" in error["message"]


@pytest.mark.parametrize(("path", "fields"), NEUTRAL, ids=range(len(NEUTRAL)))
def test_fields_that_ask_for_what_is_done_anyway_are_taken(served, path, fields) -> None:
    told = served.post(path, json=fields)
    assert told.status_code == 200, told.text


@pytest.mark.parametrize(("kind", "fields"), LONG_AND_WRONG, ids=range(len(LONG_AND_WRONG)))
def test_a_body_is_read_to_its_first_mistake(kind, fields) -> None:
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate_json(json.dumps(fields))
    assert len(wrong.value.errors()) <= 4  # one for each type that a field may have


def test_as_many_unknown_names_are_compared_as_anybody_means() -> None:
    def asked(before: int) -> CompletionRequest:
        odd = {f"a field of nobody's {n}": 1 for n in range(before)}
        return CompletionRequest.model_validate_json(json.dumps({**GOOD, **odd, "temprature": 1}))

    with pytest.raises(Refusal, match="temperature"):
        check_fields(asked(LOOKED_AT - 1))
    check_fields(asked(LOOKED_AT))


def chat_asking(**fields) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps({**CHAT, **fields}))


EFFORT = "{{ messages }}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
THINKING = "{{ messages }}{% if enable_thinking %}<think>{% endif %}"
DOCUMENTS = "{{ messages }}{% for one in documents %}{{ one.text }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "name", "refused", "taken"),
    [
        (EFFORT, "reasoning_effort", ["high", "none"], ["medium", None]),
        (THINKING, "reasoning_effort", ["none"], ["high", "medium"]),
        (DOCUMENTS, "documents", [[{"text": "a"}]], [[], None]),
        ("{{ messages }}", "reasoning_effort", [], ["high", "none"]),
    ],
)
def test_variables_of_the_template_are_refused_wherever_they_are_passed(
    template, name, refused, taken
) -> None:
    for value in refused:
        with pytest.raises(Refusal) as error:
            check_reading(chat_asking(**{name: value}), template, 5)
        assert error.value.param == name and error.value.status == 400
    for value in taken:
        check_reading(chat_asking(**{name: value}), template, 5)


def test_the_words_of_a_template_are_found_once_for_all_names() -> None:
    """A pattern for each of so many names held a thread for seconds."""
    template = f"{THINKING} of this test alone"
    odd = {f"no_such_{n}": n for n in range(50_000)}
    before = words_of.cache_info().misses
    check_reading(chat_asking(chat_template_kwargs=odd), template, 5)
    with pytest.raises(Refusal) as error:
        asked = chat_asking(chat_template_kwargs={**odd, "enable_thinking": False})
        check_reading(asked, template, 5)
    assert error.value.param == "chat_template_kwargs.enable_thinking"
    assert words_of.cache_info().misses == before + 1


@pytest.mark.parametrize("part", [{"type": "image_url"}, {"type": "x" * 100_000}, {"type": "text"}])
def test_a_part_that_is_no_text_is_refused_by_its_place(served, part) -> None:
    """And is not repeated in full, however long its type is."""
    fields = {"messages": [{"role": "user", "content": [part]}]}
    error = checked(served.post("/v1/chat/completions", json=fields))
    assert error["param"] == "messages.0.content" and len(error["message"]) < 300
    assert ("has no text" if part["type"] == "text" else part["type"][:40]) in error["message"]


def test_fields_that_mean_nothing_here_are_left_aside(served) -> None:
    fields = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "some_new_field": 1}
    more = {"tools": [], "tool_choice": "none", "modalities": ["text"], "n": None, "stop": None}
    assert served.post("/v1/chat/completions", json={**CHAT, **fields, **more}).status_code == 200


@pytest.mark.parametrize("option", ["guided", "prediction"])
def test_what_the_session_cannot_do_yet_is_said_so(served, option) -> None:
    fields = {
        "guided": {"response_format": {"type": "json_object"}},
        "prediction": {"prediction": {"type": "content", "content": "a cat"}},
    }[option]
    told = served.post("/v1/chat/completions", json={**CHAT, **fields})
    if option in SAMPLING:
        assert told.status_code == 200, told.text
    else:
        assert option in checked(told)["message"]


def test_a_prompt_beyond_the_context_is_refused_as_clients_look_for_it(served) -> None:
    longest = served.session.target.max_length
    for path, fields, param in (
        ("/v1/completions", {"prompt": [5] * (longest + 1)}, "prompt"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "on and on " * longest}]}, "messages"),
    ):  # fmt: skip
        error = checked(served.post(path, json={"max_tokens": 2, **fields}))
        assert error["code"] == "context_length_exceeded" and error["param"] == param
        assert f"maximum context length is {longest} tokens" in error["message"]
    fits = {"prompt": [5] * longest, "max_tokens": 2}
    assert served.post("/v1/completions", json=fits).status_code == 200


def test_another_model_is_not_there(served) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has one model: tiny"):
        served.client().completions.create(model="gpt-4", prompt="a")
    assert served.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("other/one")
    assert [model.id for model in served.client().models.list()] == ["tiny"]
    checked(served.get("/v2"), 404)
    checked(served.get("/v1/completions"), 405)


def test_only_who_has_a_key_is_answered(make_session, running) -> None:
    with make_session() as session, running(session, api_keys=("one", "twö")) as server:
        for key in ("one", "twö"):
            headers = {"authorization": f"Bearer {key}".encode()}
            assert server.post("/v1/completions", json=GOOD, headers=headers).status_code == 200
        for header in ("", "Bearer", "Bearer on", "Bearer onee", "Basic one", "one"):
            told = server.post("/v1/completions", json=GOOD, headers={"authorization": header})
            assert checked(told, 401)["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        assert server.client("one").models.list().data
        assert server.get("/health").status_code == 200


def test_blanks_around_a_key_are_none_of_it_and_no_key_is_none_by_mistake() -> None:
    assert Settings(api_keys=("abc ", "\tde\n")).api_keys == ("abc", "de")
    with pytest.raises(ConfigError, match="empty"):
        Settings(api_keys=(" ",))
    assert keys("") == [] and keys("one, two ,") == ["one", "two"]
    for listed in (",", " ", " , "):
        with pytest.raises(ConfigError, match="holds no key"):
            keys(listed)


def test_a_body_may_have_so_many_bytes(make_session, running) -> None:
    with make_session() as session, running(session, max_body=5000) as server:
        fits = {**GOOD, "metadata": {"a": "x" * 4000}}
        assert server.post("/v1/completions", json=fits).status_code == 200
        large = {**GOOD, "metadata": {"a": "x" * 5000}}
        assert checked(server.post("/v1/completions", json=large), 413)["code"] == "body_too_large"

        def parts():
            yield b'{"prompt": "'
            for _ in range(20):
                yield b"a" * 1000

        assert checked(server.post("/v1/completions", content=parts()), 413)
        assert server.post("/v1/completions", json=GOOD).status_code == 200


def test_a_large_body_that_is_allowed_is_read(served) -> None:
    fields = {**GOOD, "metadata": {"a": "x" * (3 << 20)}}
    assert served.post("/v1/completions", json=fields).status_code == 200


ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ForetokenError)
]


@pytest.mark.parametrize("kind", [*ERRORS, Refusal])
def test_errors_come_whole_out_of_another_process(kind) -> None:
    """Pools of processes send them pickled, and hang or break where one cannot be read."""
    error = kind("asked", "possible", "do", **({"status": 429} if kind is Refusal else {}))
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind and str(again) == str(error)
        assert (again.asked, again.possible, again.do) == ("asked", "possible", "do")
        assert vars(again) == vars(error) and getattr(again, "status", 429) == 429


def test_tokens_and_texts_are_limited(make_session, running) -> None:
    limits = {"max_tokens_limit": 5, "queue": 3}
    with make_session(max_rows=2) as session, running(session, **limits) as server:
        told = server.post("/v1/completions", json={**GOOD, "max_tokens": 6})
        assert "at most 5" in checked(told)["message"]
        usage = server.post("/v1/chat/completions", json={**CHAT, "max_tokens": None})
        assert usage.json()["usage"]["completion_tokens"] == 5
        [model] = server.get("/v1/models").json()["data"]
        assert model["foretoken"]["max_tokens"] == 5
        told = server.post("/v1/completions", json={**GOOD, "n": 6})
        assert checked(told)["code"] == "too_many_texts"
        assert server.post("/v1/completions", json={**GOOD, "n": 5}).status_code == 200


def test_sessions_that_cannot_answer_in_texts_are_refused(make_session, tiny_pair) -> None:
    import foretoken

    with foretoken.load(tiny_pair[0], "plain", kernels="dense", compile="off") as session:
        session.tokenizer = None
        with pytest.raises(ConfigError, match="without a tokenizer"):
            app(session)
    for wrong in ({"queue": -1}, {"max_body": 5}, {"grace": -1.0}, {"api_keys": ("secret", "")}):
        with pytest.raises(ConfigError) as refused:
            Settings(**wrong)
        assert "secret" not in str(refused.value)


def test_the_description_tells_of_bodies_and_errors(served) -> None:
    schema = served.get("/openapi.json").json()
    call = schema["paths"]["/v1/chat/completions"]["post"]
    name = call["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
    assert "messages" in schema["components"]["schemas"][name]["required"]
    assert {"400", "401", "413", "429", "503"} <= set(call["responses"])
    page = served.get("/docs")
    assert "max_completion_tokens" in page.text and "http" not in page.text.replace(
        "<!doctype html>", ""
    )
