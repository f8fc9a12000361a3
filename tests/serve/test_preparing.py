"""Requests that are over before their prompts were read: no thread reads for nobody."""

import errno
import json
import sys
import threading

import openai
import pytest
from live_server import wait_for

from foretoken.engine.chat import chat_ids
from foretoken.serve import answering
from foretoken.serve.asking import AT_ONCE, prompts_of, rows_of
from foretoken.serve.service import PREPARERS
from foretoken.serve.wire.errors import internal, stopping
from foretoken.serve.wire.requests import ChatRequest, CompletionRequest

SHORT = {"prompt": "a", "max_tokens": 6, "temperature": 0}


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_time_is_up_before_its_prompt_is_read_is_told_so(
    make_session, running, stream
) -> None:
    free = threading.Event()
    with make_session("plain") as session, running(session, request_timeout=0.2) as server:
        for _ in range(PREPARERS):
            server.service.preparers.submit(free.wait, 60)
        told = server.post("/v1/completions", json={**SHORT, "stream": stream})
        waited = not free.is_set()
        free.set()
        assert waited and told.status_code == 504 and told.json()["error"]["code"] == "timeout"
        wait_for(lambda: session.engine.idle and server.service.places == 0)


def test_openais_client_sends_what_took_too_long_no_second_time(make_session, running) -> None:
    """As it does with other errors of servers: here it would wait as long again, for nothing."""
    free = threading.Event()
    with make_session("plain") as session, running(session, request_timeout=0.2) as server:
        for _ in range(PREPARERS):
            server.service.preparers.submit(free.wait, 60)
        client = server.client().with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError, match="took longer"):
            client.completions.create(model="tiny", **SHORT)
        free.set()
        counted = {"path": "/v1/completions", "status": "504"}
        wait_for(lambda: server.metric("requests_total", **counted))
        assert server.metric("requests_total", **counted) == 1
    assert "x-should-retry" not in internal("1").headers | stopping().headers


def test_no_prompt_is_read_for_a_client_that_left(served) -> None:
    """It leaves while the second of three prompts is read."""
    prompts = ["a", "b", "c"]
    fields = {**SHORT, "prompt": prompts, "n": 2}
    asked = CompletionRequest.model_validate_json(json.dumps(fields))
    answers = iter([False, False, True])
    rows = rows_of(served.session, asked, prompts_of(asked), {}, None, lambda: next(answers))
    assert len(rows) == 4


def test_no_further_texts_are_prepared_for_a_client_that_left(served) -> None:
    fields = {**SHORT, "n": AT_ONCE + 5, "seed": 3, "temperature": 1}
    asked = CompletionRequest.model_validate_json(json.dumps(fields))
    prompts = prompts_of(asked)
    answers = iter([False, True])
    rows = rows_of(served.session, asked, prompts, {}, None, lambda: next(answers))
    assert len(rows) == AT_ONCE
    whole = rows_of(served.session, asked, prompts, {}, None)
    assert [row.params.seed for row in whole] == list(range(3, AT_ONCE + 8))


def test_a_model_that_cannot_be_used_is_a_fault_of_the_server(make_session, running) -> None:
    """And no mistake of the request, whose own mistakes are told as such meanwhile."""
    path = "/v1/completions"
    with make_session("plain") as session, running(session) as server:
        model = session.target.model
        model.train()
        try:
            told = server.post(path, json=SHORT)
            wrong = server.post(path, json={**SHORT, "prompt": ""})
        finally:
            model.eval()
        assert told.status_code == 500 and told.json()["error"]["code"] == "internal_error"
        assert wrong.status_code == 400
        assert server.metric("engine_errors_total") == 1
        assert server.post(path, json=SHORT).status_code == 200


def test_a_package_that_is_missing_is_a_fault_of_the_server(
    make_session, running, monkeypatch, caplog
) -> None:
    """No client can install it; whoever runs the server reads how in the log."""
    monkeypatch.delitem(sys.modules, "foretoken.engine.guided", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    path = "/v1/completions"
    with make_session("plain") as session, running(session) as server:
        told = server.post(path, json={**SHORT, "guided_regex": "a"})
        assert told.status_code == 500 and told.json()["error"]["code"] == "internal_error"
        assert "pip" not in told.text and "foretoken[guided]" in caplog.text
        assert server.metric("engine_errors_total") == 1
        assert server.post(path, json=SHORT).status_code == 200


def test_a_fault_of_the_system_while_a_prompt_is_read_is_no_client_that_left(
    make_session, running, monkeypatch
) -> None:
    """As where no more files can be opened; of those of the connection nobody is told."""

    def full(*prompts, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    path = "/v1/completions"
    with make_session("plain") as session, running(session) as server:
        monkeypatch.setattr(session, "rows", full)
        for count, stream in enumerate((False, True), start=1):
            told = server.post(path, json={**SHORT, "stream": stream})
            assert told.status_code == 500 and told.json()["error"]["code"] == "internal_error"
            assert server.metric("engine_errors_total") == count
        monkeypatch.undo()
        assert server.post(path, json=SHORT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_read_once_and_a_long_one_beside_the_event_loop(
    served, monkeypatch, stream
) -> None:
    """Its 60 tokens make an answer long as new ones do, which are 48 here."""
    kind, prompt, threads = type(served.session.tokenizer), list(range(20, 80)), []
    decode = kind.decode
    words = decode(served.session.tokenizer, prompt)

    def noting(self, tokens, **options):
        if tokens == prompt:
            threads.append(threading.current_thread().name)
        return decode(self, tokens, **options)

    monkeypatch.setattr(kind, "decode", noting)
    asked = {"prompt": prompt, "n": 4, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for long in (answering.LONG_ANSWER, 4 * 12 + 1):
        monkeypatch.setattr(answering, "LONG_ANSWER", long)
        told = served.post("/v1/completions", json={**asked, "echo": True, "stream": stream})
        assert told.status_code == 200 and told.text.count(json.dumps(words)[1:-1]) == 4
    assert len(threads) == 2 and threads[0] != threads[1]


@pytest.mark.parametrize(("seed", "seeds"), [(-1, [None, None]), (-2, [-2, -1]), (3, [3, 4])])
def test_a_seed_of_minus_one_is_none_as_other_servers_have_it(served, seed, seeds) -> None:
    asked = CompletionRequest.model_validate_json(json.dumps({**SHORT, "n": 2, "seed": seed}))
    rows = rows_of(served.session, asked, prompts_of(asked), {}, None)
    assert [row.params.seed for row in rows] == seeds


def test_fields_of_messages_that_a_template_reads_are_in_the_prompt(served, monkeypatch) -> None:
    session = served.session
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(session.tokenizer, "chat_template", template)
    thought = {"role": "assistant", "content": "b", "reasoning_content": "thought"}
    messages = [{"role": "user", "content": "a"}, thought, {"role": "user", "content": "c"}]
    asked = ChatRequest.model_validate_json(json.dumps({"messages": messages, "max_tokens": 1}))
    [row] = rows_of(session, asked, prompts_of(asked), {}, None)
    assert row.tokens == chat_ids(messages, session.tokenizer)
    assert "thought" in session.tokenizer.decode(row.tokens)
