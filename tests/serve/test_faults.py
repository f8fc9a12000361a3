"""What goes wrong around a server that runs: clients that leave or dawdle, parts that break."""

import asyncio
import json
import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest
from live_server import Slowly, wait_for

from foretoken.errors import ConfigError, WrongLogits
from foretoken.serve import Settings, answering, app, request_log
from foretoken.serve.answer import Answer
from foretoken.serve.gate import REQUESTS
from foretoken.serve.request_log import Lines, RequestLog, opened
from foretoken.serve.service import PREPARERS
from foretoken.serve.writing import Writing

LONG = {"prompt": "the cat is in the ", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "a", "max_tokens": 6, "temperature": 0}
PARTS = "this.", "that.", "so."


class Broken(Exception):
    """What a part of ours raises."""


@pytest.fixture
def slow(make_session, running):
    """A server whose steps take 20 ms."""
    with make_session("plain", max_rows=2) as session:
        session.engine.verifier = Slowly(session.engine.verifier, 0.02)
        with running(session) as server:
            yield server


def raw(server, fields, path="/v1/completions", buffer=None) -> socket.socket:
    """A connection on which a request was sent, and nothing was read."""
    body = json.dumps(fields).encode()
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.connect((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row_within_a_step(slow, stream) -> None:
    engine, rule = slow.session.engine, slow.session.engine.verifier
    sock = raw(slow, {**LONG, "stream": stream})
    wait_for(lambda: len(engine.running) == 1 and len(engine.running[0].new_tokens) > 3)
    [row] = engine.running
    sock.close()
    wait_for(lambda: row.finish is not None)
    before = rule.calls
    wait_for(lambda: engine.idle and slow.session.target.rows_held == 0)
    assert rule.calls - before <= 1 and row.finish.reason == "cancelled"
    assert len(row.new_tokens) < 100
    wait_for(lambda: slow.metric("requests_total", path="/v1/completions",
                                 status="200" if stream else "499") == 1)  # fmt: skip
    assert slow.service.places == 0


def test_a_client_that_leaves_while_it_waits_takes_no_place(slow) -> None:
    engine = slow.session.engine
    socks = []
    for count in range(1, 5):  # one after the other: requests of one moment come in any order
        socks.append(raw(slow, LONG))
        wait_for(lambda count=count: len(engine.running) + len(engine.waiting) == count)
    wait_for(lambda: len(engine.running) == 2 and len(engine.waiting) == 2)
    read = sum(row.prompt_len for row in engine.running)
    for sock in socks[2:]:
        sock.close()
    wait_for(lambda: len(engine.waiting) == 0)
    for sock in socks:
        sock.close()
    wait_for(lambda: engine.idle and slow.service.places == 0)
    path = "/v1/completions"
    wait_for(lambda: slow.metric("requests_total", path=path, status="499") == 4)
    assert slow.metric("prompt_tokens_total") == read, "two prompts were never read"


@pytest.fixture
def unprepared(slow):
    """The server, all of whose threads for prompts are busy; and what sets them free."""
    free = threading.Event()
    for _ in range(PREPARERS):
        slow.service.preparers.submit(free.wait, 60)
    yield slow, free
    free.set()


def test_a_client_that_leaves_before_its_prompt_is_read_holds_no_place(unprepared) -> None:
    server, free = unprepared
    engine, submitted = server.session.engine, []
    submit = engine.submit
    engine.submit = lambda row: (submitted.append(row), submit(row))
    sock = raw(server, LONG)
    wait_for(lambda: server.service.places == 1)
    sock.close()
    wait_for(lambda: server.service.places == 0)
    assert not free.is_set(), "nobody had to wait for the threads"
    free.set()
    assert server.post("/v1/completions", json=SHORT).status_code == 200
    assert [row.params.max_new_tokens for row in submitted] == [6], "the other was not begun"


def test_a_stream_of_guesses_whose_step_failed_ends_with_an_error(slow, monkeypatch) -> None:
    """The step has written its tokens, and nobody was told where they came from."""
    controller = slow.session.engine.controller
    observe = controller.observe

    def breaking(step):
        if any(len(row.new_tokens) > 3 for row in step.rows):
            raise Broken("behind its tokens")
        return observe(step)

    monkeypatch.setattr(controller, "observe", breaking)
    told = slow.post("/v1/completions", json={**LONG, "stream": True, "include_speculation": True})
    lines = [line.removeprefix("data: ") for line in told.text.splitlines() if line]
    assert (
        lines[-1] == "[DONE]" and "inside the server" in json.loads(lines[-2])["error"]["message"]
    )
    pieces = [json.loads(line).get("foretoken", {}).get("tokens", []) for line in lines[:-2]]
    assert 0 < sum(map(len, pieces)) <= 3


def test_whoever_waits_for_the_last_text_is_told_whatever_its_figures(slow, monkeypatch) -> None:
    monkeypatch.setattr(Answer, "facts", lambda self: 1 / 0)
    with suppress(httpx.HTTPError):  # its answer may be cut
        slow.post("/v1/completions", json=SHORT)
    wait_for(lambda: slow.service.empty.is_set())
    assert slow.service.places == 0 and not slow.service.answers


def test_a_slow_reader_stops_nobody_else(make_session, running) -> None:
    """It does not read at all while others are answered, and finds everything there later."""
    fields = {**LONG, "include_speculation": True, "stream": True, "logprobs": 20}
    with make_session() as session, running(session) as server:
        socks = [raw(server, fields) for _ in range(3)]
        wanted = session.generate(SHORT["prompt"], 6, temperature=0.0).text
        for _ in range(5):
            told = server.post("/v1/completions", json=SHORT)
            assert told.json()["choices"][0]["text"] == wanted
        wait_for(lambda: session.engine.idle)
        for sock in socks:
            sock.settimeout(30)
            got = b""
            while not got.endswith(b"0\r\n\r\n"):
                got += sock.recv(1 << 16)
            assert got.count(b"data: [DONE]") == 1 and len(got) > 200_000
            sock.close()


@pytest.mark.parametrize("where", ["start", "propose", "observe"])
def test_texts_go_on_when_the_drafter_breaks(make_session, running, monkeypatch, where) -> None:
    with make_session("chain", controller="fixed") as session:
        wanted = session.generate(LONG["prompt"], 20, temperature=0.0).text

        def broken(*args):
            raise Broken(where)

        monkeypatch.setattr(session.engine.drafter, where, broken)
        with running(session) as server:
            fields = {**LONG, "max_tokens": 20, "ignore_eos": False}
            told = server.post("/v1/completions", json=fields)
            assert told.json()["choices"][0]["text"] == wanted
            assert server.metric("drafter_errors_total") == 1
        assert type(session.engine.drafter).__name__ != "Tolerant"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", [Broken("inside"), ConfigError(*PARTS), WrongLogits(*PARTS)])
def test_what_fails_inside_is_one_requests_own(
    make_session, running, tmp_path, stream, error
) -> None:
    """A fault of ours has an id that is logged; what an option ran into is the request's."""
    log, path = tmp_path / "requests.jsonl", "/v1/completions"
    with make_session("plain") as session, running(session, log_file=log) as server:
        rule = session.engine.verifier

        class Breaking(Slowly):
            def verify(self, rows, drafts, scores):
                if any(len(row.new_tokens) > 3 for row in rows):
                    raise error
                return rule.verify(rows, drafts, scores)

        session.engine.verifier = Breaking(rule, 0)
        told = server.post("/v1/completions", json={**LONG, "stream": stream})
        mine = not isinstance(error, ConfigError)
        if stream:
            lines = [line for line in told.text.splitlines() if line]
            assert told.status_code == 200 and lines[-1] == "data: [DONE]"
            found = json.loads(lines[-2].removeprefix("data: "))["error"]
        else:
            assert told.status_code == (500 if mine else 400)
            found = told.json()["error"]
        assert ("inside the server" in found["message"]) == mine
        code = "internal_error" if mine else "invalid_request_error"
        wait_for(lambda: server.metric("request_errors_total", path=path, code=code) == 1)
        assert server.metric("engine_errors_total") == int(mine)
        assert server.post("/v1/completions", json={**SHORT, "max_tokens": 3}).status_code == 200
    first, *_ = [json.loads(line) for line in log.read_text().splitlines()]
    assert first["error"] == code


def test_what_nobody_foresaw_is_counted_and_logged_as_an_error(
    make_session, running, monkeypatch, tmp_path
) -> None:
    log, path = tmp_path / "requests.jsonl", "/v1/completions"
    with make_session("plain") as session, running(session, log_file=log) as server:
        monkeypatch.setattr(server.service, "check_model", lambda name: 1 / 0)
        assert server.post(path, json=SHORT).status_code == 500
        assert server.metric("request_errors_total", path=path, code="internal_error") == 1
    [line] = [json.loads(line) for line in log.read_text().splitlines()]
    assert line["status"] == 500 and line["error"] == "internal_error"


def test_a_step_that_fails_as_a_whole_ends_its_texts_and_not_the_server(slow, monkeypatch) -> None:
    engine = slow.session.engine
    target = engine.target
    monkeypatch.setattr(type(target), "free", lambda self, rows: 1 / 0)
    told = slow.post("/v1/completions", json=SHORT)
    assert told.status_code in (200, 500)
    monkeypatch.undo()
    wait_for(lambda: slow.metric("engine_errors_total") >= 1)
    target.reset()
    assert slow.get("/health").json() == {"status": "ok"}
    assert slow.post("/v1/completions", json=SHORT).status_code == 200


def test_a_request_has_so_much_time(make_session, running) -> None:
    with make_session("plain") as session:
        session.engine.verifier = Slowly(session.engine.verifier, 0.02)
        with running(session, request_timeout=2.0) as server:
            told = server.post("/v1/completions", json=LONG)
            assert told.status_code == 504 and told.json()["error"]["code"] == "timeout"
            told = server.post("/v1/completions", json={**LONG, "stream": True})
            assert told.status_code == 200 and '"code":"timeout"' in told.text
            assert told.text.endswith("data: [DONE]\n\n")
            wait_for(lambda: session.engine.idle and server.service.places == 0)
            server.service.settings = replace(server.service.settings, request_timeout=None)
            assert server.post("/v1/completions", json=SHORT).status_code == 200
            path = "/v1/completions"
            wait_for(lambda: server.metric("request_errors_total", path=path, code="timeout") == 2)


def test_who_does_not_read_holds_no_place_beyond_the_limit(
    make_session, running, monkeypatch, tmp_path
) -> None:
    """Its stream is longer than what buffers take."""
    monkeypatch.setattr(answering, "UNREAD_LATE", 0.2)
    path = tmp_path / "requests.jsonl"
    fields = {**LONG, "n": 8, "include_speculation": True, "stream": True, "logprobs": 20}
    with (
        make_session() as session,
        running(session, request_timeout=1.5, log_file=path) as server,
        raw(server, fields, buffer=4096) as sock,
    ):
        wait_for(lambda: server.service.places == 8)
        wait_for(lambda: server.service.places == 0)
        wait_for(lambda: session.engine.idle)  # the step in which it was left ends
        server.service.settings = replace(server.service.settings, request_timeout=None)
        assert server.post("/v1/completions", json=SHORT).status_code == 200
        sock.close()
    [line, _] = [json.loads(line) for line in path.read_text().splitlines()]
    assert line["error"] == "timeout" and line["seconds"] >= 1.5


def test_who_does_not_read_is_left_where_requests_have_any_time(
    make_session, running, monkeypatch
) -> None:
    monkeypatch.setattr(answering, "UNREAD", 0.5)
    fields = {**LONG, "n": 8, "include_speculation": True, "stream": True, "logprobs": 20}
    with make_session() as session, running(session) as server:
        with raw(server, fields, buffer=4096):
            wait_for(lambda: server.service.places == 8)
            wait_for(lambda: server.service.places == 0)
            wait_for(lambda: session.engine.idle)
        path = "/v1/completions"
        wait_for(lambda: server.metric("request_errors_total", path=path, code="client_left") == 1)


def test_a_log_that_nobody_takes_does_not_hold_up_the_end(tmp_path, monkeypatch) -> None:
    """A pipe that is full: its reader stands still."""
    monkeypatch.setattr(request_log, "CLOSING", 0.3)
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    log = RequestLog(tmp_path / "log", lambda: None)
    log.open()
    for number in range(2000):
        REQUESTS.info("request", extra={"request": {"id": number, "path": "/v1/" + "x" * 100}})
    began = time.perf_counter()
    log.close()
    assert 0.2 < time.perf_counter() - began < 5
    os.set_blocking(reader, True)
    told = b""
    while told.count(b"\n") < 2000:  # the writer goes on once it is read again
        told += os.read(reader, 1 << 16)
    os.close(reader)
    assert [json.loads(line)["id"] for line in told.splitlines()] == list(range(2000))


def test_a_line_that_was_torn_ends_before_the_next(tmp_path, monkeypatch) -> None:
    path, failed, write = tmp_path / "log", [], os.write
    lines = Lines(opened(path), lambda: failed.append(1))
    room = [10]

    def short(descriptor, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        count = write(descriptor, bytes(data)[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", short)
    record = logging.makeLogRecord({"request": {"id": 1}})
    lines.emit(record)
    lines.emit(record)
    room[0] = 1000
    lines.emit(record)
    lines.emit(record)
    torn, *whole = path.read_text().splitlines()
    assert len(torn) == 10 and [json.loads(line)["id"] for line in whole] == [1, 1]
    assert failed == [1, 1]


def test_a_full_disk_for_the_log_stops_nothing(make_session, running) -> None:
    with make_session() as session, running(session, log_file="/dev/full") as server:
        for _ in range(3):
            assert server.post("/v1/completions", json=SHORT).status_code == 200
        wait_for(lambda: server.metric("log_errors_total") == 3)


def test_each_request_is_a_line_without_secrets(make_session, running, tmp_path) -> None:
    path = tmp_path / "requests.jsonl"
    with make_session() as session, running(session, log_file=path, api_keys=("hush",)) as server:
        headers = {"authorization": "Bearer hush"}
        asked = {**SHORT, "user": "ann", "n": 2, "stream": True}
        server.post("/v1/completions", json=asked, headers=headers)
        server.post("/v1/completions", content=b"{", headers=headers)
        server.post("/v1/completions", json=SHORT)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 400, 401]
    first = lines[0]
    assert first["requester"] == "key 0/ann" and first["texts"] == 2 and first["tokens"] == 12
    assert first["ttft"] > 0 and first["seconds"] >= first["ttft"] and first["stream"] is True
    assert len({line["id"] for line in lines}) == 3 and "hush" not in path.read_text()
    with pytest.raises(ConfigError, match="a request log"):
        RequestLog(tmp_path / "no" / "folder", lambda: None)


def test_a_jump_of_the_clock_changes_times_told_and_nothing_else(
    make_session, running, monkeypatch
) -> None:
    real = time.time
    with make_session() as session, running(session, request_timeout=60.0) as server:
        wanted = server.post("/v1/completions", json=SHORT).json()["choices"]
        for jump in (-1e8, 1e8):
            monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
            told = server.post("/v1/completions", json=SHORT).json()
            assert told["choices"] == wanted and abs(told["created"] - real() - jump) < 100
            stream = server.post("/v1/completions", json={**SHORT, "stream": True})
            assert stream.text.endswith("data: [DONE]\n\n")
        wait_for(lambda: server.metric("time_to_first_token_seconds_count") == 5)
        assert 0 < server.metric("time_to_first_token_seconds_sum") < 60


def test_the_session_can_be_asked_from_python_meanwhile(served) -> None:
    """Whoever waits may lead; the server's own thread hands over what others' steps add."""
    wanted = served.post("/v1/completions", json={**LONG, "max_tokens": 60}).json()["choices"]
    texts = []

    def ask():
        for _ in range(5):
            texts.append(served.session.generate(SHORT["prompt"], 30, temperature=0.0).text)

    thread = threading.Thread(target=ask)
    thread.start()
    for stream in (False, True, False):
        fields = {**LONG, "max_tokens": 60, "stream": stream}
        told = served.post("/v1/completions", json=fields)
        if not stream:
            assert told.json()["choices"] == wanted
    thread.join()
    assert len(set(texts)) == 1


def test_connections_and_files_are_given_back(served) -> None:
    def handles():
        return len(os.listdir("/proc/self/fd"))

    served.post("/v1/completions", json=SHORT)
    before = handles()
    for stream in (True, False) * 5:
        with httpx.Client() as client:
            client.post(f"{served.url}/v1/completions", json={**SHORT, "stream": stream})
    wait_for(lambda: handles() <= before + 2)


def test_a_text_whose_end_cannot_be_told_ends_with_an_error_and_others_go_on(
    slow, monkeypatch
) -> None:
    """A tokenizer that breaks on the tokens of one text: the other one never hears of it."""
    wanted = slow.post("/v1/completions", json={**LONG, "max_tokens": 20}).json()["choices"]
    piece = Writing._piece

    def breaking(self, whole):
        if self.row.params.max_new_tokens == 7:
            raise Broken("no such token")
        return piece(self, whole)

    monkeypatch.setattr(Writing, "_piece", breaking)
    with ThreadPoolExecutor(2) as pool:
        asked = [{**LONG, "max_tokens": n, "stream": n == 7} for n in (20, 7)]
        good, bad = pool.map(lambda fields: slow.post("/v1/completions", json=fields), asked)
    assert good.json()["choices"] == wanted
    assert '"error"' in bad.text and bad.text.endswith("data: [DONE]\n\n")
    wait_for(lambda: slow.session.engine.idle and slow.service.places == 0)
    assert slow.get("/health").json() == {"status": "ok"}


def test_rows_that_cannot_be_freed_leave_nobody_waiting(slow, monkeypatch) -> None:
    """One text ends while another is written, and its slot cannot be given back."""
    target = slow.session.engine.target
    monkeypatch.setattr(type(target), "free", lambda self, rows: 1 / 0)
    with ThreadPoolExecutor(2) as pool:
        asked = [{**LONG, "max_tokens": n} for n in (6, 40)]
        told = list(pool.map(lambda fields: slow.post("/v1/completions", json=fields), asked))
    assert all(one.status_code in (200, 500) for one in told)
    monkeypatch.undo()
    target.reset()
    assert slow.get("/health").json() == {"status": "ok"}
    assert slow.post("/v1/completions", json=SHORT).status_code == 200


def test_a_client_that_leaves_while_it_sends_is_no_fault_of_ours(slow) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    time.sleep(0.2)
    sock.close()
    wait_for(lambda: slow.metric("requests_total", path="/v1/completions", status="499") == 1)
    assert slow.metric("engine_errors_total") == 0


def test_the_log_says_which_texts_were_broken_off(make_session, running, tmp_path) -> None:
    log = tmp_path / "requests.jsonl"
    with make_session("plain", max_rows=2) as session:
        session.engine.verifier = Slowly(session.engine.verifier, 0.02)
        with running(session, log_file=log) as server:
            sock = raw(server, {**LONG, "stream": True})
            wait_for(lambda: session.engine.running and session.engine.running[0].new_tokens)
            sock.close()
            wait_for(lambda: session.engine.idle and server.service.places == 0)
            server.post("/v1/completions", json=SHORT)
            wait_for(lambda: len(log.read_text().splitlines()) == 2)
    left, whole = map(json.loads, log.read_text().splitlines())
    assert left["finish_reasons"] == ["cancelled"] and left["error"] == "client_left"
    assert whole["finish_reasons"] == ["length"] and "error" not in whole


def test_keys_are_asked_for_under_a_root_path(make_session) -> None:
    """As behind a proxy, or in an app around this one: the path then begins with the root."""

    async def statuses(key: str) -> list[int]:
        served = app(session, Settings(api_keys=("secret",)))
        transport = httpx.ASGITransport(served, root_path="/llm")
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://x", headers=headers
        ) as client:
            paths = ("/llm/v1/models", "/v1/models", "/llm/none")
            return [(await client.get(path)).status_code for path in paths]

    with make_session("plain") as session:
        assert asyncio.run(statuses("wrong")) == [401, 401, 404]
        assert asyncio.run(statuses("secret")) == [200, 200, 404]
