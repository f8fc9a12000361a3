"""What holds a connection open, and what ends it: streams that wait, bodies that do not come."""

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from live_server import Slowly, wait_for

from foretoken.serve import answering

PATH = "/v1/completions"
LONG = {"prompt": "the cat is in the ", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "a", "max_tokens": 6, "temperature": 0}


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
