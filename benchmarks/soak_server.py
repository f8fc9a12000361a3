"""The server of a soak: a process of its own, and what is left of its load once nobody asks."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from pair import WORK
from serving import free_port, until_ready
from soak_watch import Sample, Watch

from foretoken import minis
from foretoken.serve.answer import LEFT

KEY, ROWS, QUEUE, BODY = "one-of-the-soak", 16, 256, 256 * 1024
QUIET = 30.0  # seconds until everything must be at rest


def draft_of(asked: argparse.Namespace) -> str | Path | None:
    """The draft that goes with the target."""
    return asked.draft or (None if asked.target else minis.path("text-draft"))


@dataclass
class Serving:
    """A server in a process of its own."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path  # a line for every request
    said: Path  # standard output and error

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60.0, trust_env=False)


@contextmanager
def served(asked: argparse.Namespace) -> Iterator[Serving]:
    """`foretoken serve` from its first answer to its end; Ctrl-C does not reach it."""
    port, work = free_port(), WORK
    work.mkdir(parents=True, exist_ok=True)
    log, said = work / "soak-requests.jsonl", work / "soak-server.log"
    log.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "foretoken", "serve", "--port", str(port), "--max-rows", str(ROWS),
        "--target", str(asked.target or "text-target"), "--method", asked.method, "--dtype",
        asked.dtype, "--queue", str(QUEUE), "--max-body", f"{BODY}B", "--prefix-cache",
        "64MiB", "--log-file", str(log),
    ]  # fmt: skip
    draft = draft_of(asked)
    command += ["--draft", str(draft)] if draft is not None else []
    command += ["--set", f"depth={asked.depth}"] if asked.depth is not None else []
    threads = {"OMP_NUM_THREADS": str(asked.threads or 1), "FORETOKEN_API_KEY": KEY}
    with said.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **threads},
            start_new_session=True,
        )  # fmt: skip
        try:
            until_ready("foretoken serve", process, f"http://127.0.0.1:{port}/health", said)
            yield Serving(process, f"http://127.0.0.1:{port}", log, said)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left once nobody asks any more."""

    rows: float  # in the batch, the queue or the cache
    full: bool  # whether as many texts as there are places were taken at once
    cpu: float  # share of a core
    handles: int
    logged: frozenset[str]  # ids of requests that were answered to the end
    status: int  # of the process, once it was told to end
    errors: int  # lines of its output that speak of errors


def at_rest(serving: Serving, watch: Watch, quick: bool) -> Rest:
    """Wait for the end of all texts, look once more, ask for all places, and end the server."""
    ends = time.monotonic() + QUIET
    while held(last := watch.take()) and time.monotonic() < ends:
        time.sleep(0.2)
    time.sleep(1.0)  # connections were closed by the clients
    with serving.client() as client:
        before, began = watch.cpu(), time.monotonic()
        time.sleep(1.0 if quick else 10.0)
        cpu = (watch.cpu() - before) / (time.monotonic() - began)
        handles = watch.process.num_fds()
        body = {"prompt": ["a"] * (ROWS + QUEUE), "max_tokens": 1}
        full = client.post("/v1/completions", json=body).status_code == 200
        last = watch.take()
    serving.process.terminate()
    try:
        status = serving.process.wait(QUIET)
    except subprocess.TimeoutExpired:
        status = -1
    told = serving.said.read_text(errors="replace").splitlines()
    errors = sum("rror" in one or "Traceback" in one for one in told)
    logged = answered(serving.log.read_text())
    return Rest(held(last), full, cpu, handles, logged, status, errors)


def held(sample: Sample) -> float:
    """Texts of which the server still knows."""
    return sum(sample.figures[name] for name in ("queue_length", "running_rows", "cache_rows"))


def answered(log: str) -> frozenset[str]:
    """Ids of the lines of a request log, but for those of clients that left before the end."""
    found = set[str]()
    for line in log.splitlines():
        with suppress(ValueError):  # a line that was cut off tells of nobody
            told = json.loads(line)
            if told.get("error") != LEFT:
                found.add(told["id"])
    return frozenset(found)
