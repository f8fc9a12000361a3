"""What holds a connection open, and what ends it: streams that wait, bodies that do not come."""

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from live_server import Slowly, wait_for

from foretoken.serve import answering, heads

PATH = "/v1/completions"
LONG = {"prompt": "the cat is in the ", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "a", "max_tokens": 6, "temperature": 0}
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_HEAD = HEAD[:-2] + b"Connection: close\r\n\r\n"


def connected(server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=3)


def read_on(sock: socket.socket, told: bytes = b"", until: bytes | None = None) -> bytes:
    """What comes up to these bytes, or up to the end of the connection."""
    while (until is None or until not in told) and (part := sock.recv(1 << 16)):
        told += part
    return told


@pytest.fixture(params=["httptools", "h11"])
def parser(request, monkeypatch) -> str:
    """Each parser of heads in turn."""
    if request.param == "h11":
        monkeypatch.setattr(heads, "find_spec", lambda name: None)
    else:
        pytest.importorskip("httptools")
    return request.param


def test_a_stream_that_waits_for_a_place_says_that_it_is_alive(
    make_session, running, monkeypatch
) -> None:
    """A proxy ends what sends no byte for a minute; OpenAI's client passes over the comments."""
    monkeypatch.setattr(answering, "ALIVE", 0.2)
    with make_session("plain", max_rows=1) as session, ThreadPoolExecutor(3) as pool:
        session.engine.verifier = Slowly(session.engine.verifier, 0.02)
        with running(session) as server:
            ask = server.client().completions.create
            first = pool.submit(server.post, PATH, json=LONG)
            wait_for(lambda: len(session.engine.running) == 1)
            raw = pool.submit(server.post, PATH, json={**SHORT, "stream": True})
            told = pool.submit(lambda: list(ask(model="tiny", stream=True, **SHORT)))
            lines = [line for line in raw.result().text.splitlines() if line]
            text = "".join(one.choices[0].text for one in told.result())
            assert first.result().status_code == 200
            whole = server.post(PATH, json=SHORT).json()
    assert lines[0].startswith(":") and lines[-1] == "data: [DONE]"
    data = [line.removeprefix("data: ") for line in lines[:-1] if not line.startswith(":")]
    written = "".join(json.loads(one)["choices"][0]["text"] for one in data)
    assert written == text == whole["choices"][0]["text"]


def test_a_client_that_stalls_while_it_sends_is_told_so_and_left(
    make_session, running, tmp_path
) -> None:
    log = tmp_path / "requests.jsonl"
    with (
        make_session("plain") as session,
        running(session, request_timeout=0.5, log_file=log) as server,
    ):
        host, port = server.url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"
        told = b""
        with socket.create_connection((host, int(port)), timeout=3) as sock:
            sock.sendall(head)
            while part := sock.recv(1 << 16):  # to the end of the connection
                told += part
        assert told.startswith(b"HTTP/1.1 408 ") and b'"code":"timeout"' in told
        wait_for(lambda: server.metric("request_errors_total", path=PATH, code="timeout") == 1)
        assert server.metric("engine_errors_total") == 0
        assert server.metric("time_to_first_token_seconds_count") == 0, "no text was asked for"
    [line] = [json.loads(line) for line in log.read_text().splitlines()]
    assert line["status"] == 408 and line["error"] == "timeout"


def test_what_is_only_looked_at_can_be_asked_for_by_its_head(served) -> None:
    for path in ("/health", "/", "/docs", "/metrics", "/v1/models", "/v1/models/tiny"):
        told = httpx.head(served.url + path, timeout=60.0)
        assert told.status_code == 200 and told.content == b"", path
        assert told.headers["content-type"] == served.get(path).headers["content-type"]


def test_idle_connections_outlast_those_of_proxies(served) -> None:
    """Or a proxy would now and then send a request on one that was just closed."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    for _ in range(2):
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read()) == {"status": "ok"}
    connection.close()
    assert served.server.config.timeout_keep_alive > 60


def test_a_body_that_comes_slowly_is_read_to_its_end(make_session, running) -> None:
    """The limit is of silence: a long prompt on a thin line takes its time."""
    with make_session("plain") as session, running(session, request_timeout=1.0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(SHORT).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        told = b""
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(head.encode())
            for at in range(0, len(body), len(body) // 4):
                time.sleep(0.4)
                sock.sendall(body[at : at + len(body) // 4])
            while part := sock.recv(1 << 16):
                told += part
    assert told.startswith(b"HTTP/1.1 200 ")


def test_a_head_without_an_end_is_not_kept(make_session, running, parser) -> None:
    with make_session("plain") as session, running(session) as server:
        told = b""
        with connected(server) as sock, suppress(ConnectionError):
            sock.sendall(b"GET /health HTTP/1.1\r\nX: ")
            sock.sendall(b"a" * (8 << 20))
            told = read_on(sock)  # TimeoutError where all of it is taken
        assert told.split()[1:2] in ([], [b"400"], [b"431"])
        with connected(server) as sock:
            sock.sendall(LAST_HEAD)
            assert read_on(sock).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("size", "status"), [(60_000, b"200"), (70_000, b"431")])
def test_heads_may_have_so_many_bytes_however_they_come(
    make_session, running, size, status
) -> None:
    pytest.importorskip("httptools")
    head = LAST_HEAD[:-2] + b"X: " + b"a" * size + b"\r\n\r\n"
    with make_session("plain") as session, running(session) as server, connected(server) as sock:
        sock.sendall(head)
        told = read_on(sock)
    assert told.split()[1] == status
    if status == b"431":
        error = json.loads(told.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "headers_too_large" and "65536 bytes" in error["message"]


def test_a_head_that_is_too_long_is_told_so_before_its_end(make_session, running, parser) -> None:
    with make_session("plain") as session, running(session) as server:
        with connected(server) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000)
            status = read_on(sock).split()[1]
        assert status == (b"400" if heads.find_spec("httptools") is None else b"431")
        if status == b"431":
            assert server.metric("requests_total", path="other", status="431") == 1


def test_who_does_not_come_to_the_end_of_a_head_is_left(
    make_session, running, monkeypatch, parser
) -> None:
    monkeypatch.setattr(heads, "IDLE", 0.4)
    with make_session("plain") as session, running(session, request_timeout=0.4) as server:
        with connected(server) as sock:
            assert read_on(sock) == b"", "nothing was asked, so nothing is told"
        with connected(server) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\n")
            told = read_on(sock)
            assert told.startswith(b"HTTP/1.1 408 ") and b'"code": "timeout"' in told
        with connected(server) as sock:
            sock.sendall(HEAD)
            told = read_on(sock, until=b"}")
            sock.sendall(HEAD[:9])
            told = read_on(sock, told)
            assert told.startswith(b"HTTP/1.1 200 ") and told.count(b"HTTP/1.1 408 ") == 1


def test_no_text_is_broken_off_for_the_head_behind_its_own(
    make_session, running, monkeypatch, parser
) -> None:
    """It may be unread by the server as long as the text is written."""
    monkeypatch.setattr(heads, "WAITING", 0.3)
    with make_session("plain") as session:
        session.engine.verifier = Slowly(session.engine.verifier, 0.02)
        with running(session) as server, connected(server) as sock:
            body = json.dumps({**LONG, "stream": True}).encode()
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body + HEAD[:9])
            told = read_on(sock)
    assert told.startswith(b"HTTP/1.1 200 ") and told.count(b"data: [DONE]") == 1
    assert told.count(b"HTTP/1.1 408 ") == 1


def test_requests_in_one_piece_and_bodies_in_many_are_read(make_session, running, parser) -> None:
    """Bytes of bodies are none of a head."""
    body = json.dumps({**SHORT, "metadata": {"a": "x" * (1 << 20)}}).encode()
    with make_session("plain") as session, running(session) as server:
        with connected(server) as sock:
            sock.sendall(HEAD + HEAD + LAST_HEAD)
            assert read_on(sock).count(b'{"status":"ok"}') == 3
        parts = (body[at : at + 1000] for at in range(0, len(body), 1000))
        assert server.post(PATH, content=parts).status_code == 200
        assert server.post(PATH, content=body).status_code == 200
