"""`foretoken serve` as a process: how it starts, ends gently, ends at once, and is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from live_server import wait_for
from typer.testing import CliRunner

from foretoken.cli import app

LONG = {"prompt": "the cat is in the ", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
runner = CliRunner()


@contextmanager
def process(folders, *flags, **environment):
    """A server of its own process; its URL and the process."""
    target, draft = map(str, folders)
    command = [sys.executable, "-m", "foretoken", "serve", "--target", target, "--draft", draft]
    command += ["--method", "chain", "--set", "kernels=dense", "--set", "compile=off"]
    command += ["--set", "controller=fixed", "--set", "depth=1", "--port", "0", *flags]
    child = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    said = []
    try:
        for line in iter(child.stderr.readline, ""):
            said.append(line)
            if found := re.search(r"at (http://[\d.:]+)/v1", line):
                break
        else:
            raise AssertionError("".join(said))
        reader = threading.Thread(target=said.extend, args=(child.stderr,))
        reader.start()
        wait_for(lambda: answers(found[1]))
        yield found[1], child, said
    finally:
        child.kill()
        child.wait()
        reader.join()
        child.stderr.close()


def answers(url):
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.ConnectError:
        return False


def stream(url, found, **fields):
    """Read a stream to its end in a thread: the text of its lines."""

    def read():
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, **fields, "stream": True},
                          timeout=60.0) as told:  # fmt: skip
            for line in told.iter_lines():
                if line:
                    found.append(line)

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: len(found) > 3)
    return thread


def test_a_signal_lets_texts_end_and_refuses_new_ones(pair_folders) -> None:
    with process(pair_folders, "--grace", "120", FORETOKEN_API_KEY="") as (url, child, said):
        found = []
        thread = stream(url, found, n=8)
        child.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 503)
        refused = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
        running = not any("[DONE]" in line for line in found)
        thread.join()
        assert child.wait(timeout=30) == 0
    assert refused.status_code == 503 and refused.headers["retry-after"] and running
    assert refused.json()["error"]["code"] == "stopping"
    last = json.loads(found[-2].removeprefix("data: "))
    assert found[-1] == "data: [DONE]" and last["choices"][0]["finish_reason"] == "length"
    text = "".join(said)
    assert "chain, lossless" in text and "16 texts at once, 256 wait" in text
    lines = [json.loads(line) for line in said if line.startswith("{")]
    assert [line["status"] for line in lines] == [503, 200]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["grace", "second"])
def test_what_does_not_end_in_time_ends_with_a_clean_error(pair_folders, how) -> None:
    grace = "0.3" if how == "grace" else "60"
    with process(pair_folders, "--grace", grace, "--max-rows", "64") as (url, child, _):
        found = []
        thread = stream(url, found, n=48)
        began = time.perf_counter()
        child.send_signal(signal.SIGINT)
        if how == "second":
            time.sleep(0.2)
            child.send_signal(signal.SIGINT)
        thread.join()
        assert child.wait(timeout=30) == 0 and time.perf_counter() - began < 15
    error = json.loads(found[-2].removeprefix("data: "))["error"]
    assert error["code"] == "stopping" and found[-1] == "data: [DONE]"


@pytest.mark.slow
def test_a_server_that_was_killed_starts_again(pair_folders, tmp_path) -> None:
    log = tmp_path / "log.jsonl"
    with process(pair_folders, "--log-file", str(log)) as (url, child, _):
        port = url.rpartition(":")[2]
        wanted = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60).json()["choices"]
        found = []
        with pytest.raises(httpx.RemoteProtocolError), httpx.stream(
            "POST", f"{url}/v1/completions", json={**LONG, "stream": True}
        ) as told:  # fmt: skip
            for line in told.iter_lines():
                found.append(line)
                child.kill()
        assert child.wait() == -signal.SIGKILL
    with process(pair_folders, "--port", port, "--log-file", str(log)) as (url, _, _):
        told = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60).json()["choices"]
        assert told == wanted
        wait_for(lambda: len(log.read_text().splitlines()) == 2)
    assert [json.loads(line)["status"] for line in log.read_text().splitlines()] == [200, 200]


def test_the_command_teaches_and_refuses_early(pair_folders) -> None:
    told = runner.invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert "curl" in told and "from openai import OpenAI" in told
    target = ["serve", "--target", str(pair_folders[0]), "--set", "kernels=dense"]
    target += ["--set", "compile=off"]
    for flags, word in (
        (["--max-body", "lots"], "4MiB"),
        (["--port", "99999999"], "--port"),
        (["--queue", "-1"], "queue"),
        (["--log-file", "/no/such/folder/log", "--port", "0", "--method", "plain"], "folder"),
        (["--method", "beam-sampling", "--draft", str(pair_folders[1]), "--port", "0"], "single"),
    ):
        ran = runner.invoke(app, [*target, *flags])
        assert ran.exit_code == 2 and word in ran.stderr, ran.output


def test_a_port_that_is_taken_is_told_before_weights_are_read(served) -> None:
    port = served.url.rpartition(":")[2]
    ran = runner.invoke(app, ["serve", "--target", "/no/such/model", "--port", port])
    assert ran.exit_code == 2 and f"127.0.0.1:{port}" in ran.stderr
