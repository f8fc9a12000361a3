"""`foretoken serve --ray`: two replicas behind one address, one of which is killed."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from live_server import wait_for
from typer.testing import CliRunner

from foretoken.cli import app
from foretoken.errors import ConfigError

HAVE_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAVE_RAY, reason="needs ray: pip install 'foretoken[ray]'")
CHATS = [f"Hello number {number}" for number in range(12)]
REPLICA = "x-foretoken-replica"
runner = CliRunner()


class Cluster:
    """A server of replicas in processes of its own."""

    def __init__(self, log):
        self.log, self.figures_at = log, free_port()
        command = [sys.executable, "-m", "foretoken", "serve", "--ray", "--replicas", "2"]
        command += ["--threads", "1", "--port", "0", "--grace", "20", "--set", "compile=off"]
        command += ["--metrics-port", str(self.figures_at)]
        with log.open("w") as file:
            self.child = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                env={**os.environ, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"},
            )
        wait_for(self.ready, 200)
        self.url = re.search(r"serves \S+ at (http://[\d.:]+)/v1", log.read_text())[1]

    def ready(self):
        assert self.child.poll() is None, self.log.read_text()
        time.sleep(0.5)
        return "foretoken serves" in self.log.read_text()

    def ask(self, text, tokens=2, history=()):
        messages = [{"role": "user", "content": text}, *history]
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=90)

    def figures(self):
        """What each replica tells at a port of its own."""
        found = []
        for port in range(self.figures_at, self.figures_at + 4):
            try:
                found.append(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text)
            except httpx.ConnectError:
                continue
        return found

    def replicas(self):
        """Ids of the processes of its replicas, and of nobody else's."""
        told = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True)
        rows = [line.split(None, 2) for line in told.stdout.splitlines()]
        parents = {int(pid): int(parent) for pid, parent, *_ in rows}

        def is_ours(pid):
            while pid in parents and pid != self.child.pid:
                pid = parents[pid]
            return pid == self.child.pid

        return [
            int(pid) for pid, _, args in rows if "ray::ServeReplica" in args if is_ours(int(pid))
        ]


def free_port():
    """A port that was free, with three behind it that mostly are."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return min(one.getsockname()[1], 65000)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("ray") / "log")
    try:
        yield made
    finally:
        made.child.send_signal(signal.SIGINT)
        try:
            made.child.wait(timeout=60)
        finally:
            made.child.kill()
            made.child.wait()


@needs_ray
@pytest.mark.slow
def test_a_conversation_stays_with_its_replica(cluster) -> None:
    homes = {}
    for chat in CHATS:
        first = cluster.ask(chat)
        said = first.json()["choices"][0]["message"]
        turn = [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "?"}]
        second = cluster.ask(chat, history=turn)
        assert first.status_code == second.status_code == 200
        assert first.headers[REPLICA] == second.headers[REPLICA]
        assert first.headers.get_list("x-request-id") == [first.json()["id"].split("-")[1]]
        homes[chat] = first.headers[REPLICA]
    assert len(set(homes.values())) == 2


@needs_ray
@pytest.mark.slow
def test_each_replica_tells_its_own_figures(cluster) -> None:
    """A scrape of the common address would reach now one, now another."""
    before = len(CHATS)
    for chat in CHATS:
        assert cluster.ask(chat).status_code == 200
    told = cluster.figures()
    pattern = r'foretoken_requests_total{path="/v1/chat/completions",status="200"} ([0-9.]+)'
    asked = [float(re.search(pattern, text)[1]) for text in told]
    assert len(asked) == 2 and min(asked) > 0 and sum(asked) >= before
    assert httpx.get(f"{cluster.url}/metrics", timeout=30).status_code == 404


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ray's own use of pydantic
@pytest.mark.parametrize(
    ("asked", "gpus", "wanted"),
    [
        ("cpu", 4, "cpu"),
        ("cuda", 0, "cuda"),
        (None, 0, None),
        (None, 2, "cuda"),
        (None, 1, "refused"),
    ],
)
def test_replicas_run_where_the_cluster_has_room_for_each(asked, gpus, wanted) -> None:
    from foretoken.serve.scale import Scale, device_of

    if wanted == "refused":
        with pytest.raises(ConfigError, match="--replicas 1, or --device cpu"):
            device_of({"device": asked}, Scale(replicas=2), gpus)
    else:
        assert device_of({"device": asked}, Scale(replicas=2), gpus) == wanted


@needs_ray
@pytest.mark.slow
def test_a_killed_replica_loses_no_later_request_and_is_replaced(cluster) -> None:
    homes = {chat: cluster.ask(chat).headers[REPLICA] for chat in CHATS}
    running, threads = [], []
    for chat in CHATS:
        ask = threading.Thread(target=lambda chat=chat: running.append(cluster.ask(chat, 200)))
        ask.start()
        threads.append(ask)
    time.sleep(0.5)
    killed = cluster.replicas()[0]
    os.kill(killed, signal.SIGKILL)
    time.sleep(1.0)
    later = [cluster.ask(chat) for chat in CHATS]
    for thread in threads:
        thread.join()

    assert {answer.status_code for answer in later} == {200}
    stayed = {homes[chat] for chat, answer in zip(CHATS, later, strict=True)
              if answer.headers[REPLICA] == homes[chat]}  # fmt: skip
    assert len(stayed) == 1  # chats of the replica that lives have not moved
    assert len(running) == len(CHATS)
    for answer in running:
        lost = answer.status_code == 503 and answer.json()["error"]["code"] == "replica_lost"
        assert answer.status_code == 200 or lost, answer.text
    assert any(answer.status_code == 503 for answer in running)
    wait_for(lambda: len(set(cluster.replicas()) - {killed}) == 2, 60)


@needs_ray
@pytest.mark.slow
def test_a_signal_lets_running_texts_end(cluster) -> None:
    body = {"prompt": "User: Hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
    lines = []
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=90) as told:
        for line in told.iter_lines():
            if not lines:
                cluster.child.send_signal(signal.SIGTERM)
            lines += [line] if line else []
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"
    assert cluster.child.wait(timeout=60) == 0


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ray's own use of pydantic
@pytest.mark.parametrize("where", ["start", "run"])
def test_an_interrupt_while_replicas_load_leaves_nothing_on_the_cluster(monkeypatch, where) -> None:
    from foretoken.serve import scale
    from foretoken.serve.settings import Settings

    def interrupted(*given, **options):
        raise KeyboardInterrupt

    left = []
    monkeypatch.setenv("RAY_ADDRESS", "there:6379")
    monkeypatch.setattr(scale, "application", lambda *given: None)
    monkeypatch.setattr(scale.CLUSTER, "init", lambda **options: None)
    monkeypatch.setattr(scale.CLUSTER, "shutdown", lambda: left.append("cluster"))
    monkeypatch.setattr(scale.serve, "start", lambda **options: None)
    monkeypatch.setattr(scale.serve, "run", lambda *given, **options: None)
    monkeypatch.setattr(scale.serve, "delete", left.append)
    monkeypatch.setattr(scale.serve, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        scale.begin({}, Settings(), scale.Scale(), "127.0.0.1", 8000)
    assert left == [scale.NAME, "cluster"]


def test_options_of_replicas_need_ray() -> None:
    ran = runner.invoke(app, ["serve", "--replicas", "3"])
    assert ran.exit_code == 2 and "--replicas" in ran.stderr and "--ray" in ran.stderr


def test_what_replicas_would_remember_and_never_save_is_refused() -> None:
    asked = ["--method", "token-recycling", "--set", "memory=learnt.bin"]
    ran = runner.invoke(app, ["serve", "--ray", "--port", "0", *asked])
    assert ran.exit_code == 2 and "memory=learnt.bin" in ran.stderr and "remember" in ran.stderr


@pytest.mark.skipif(HAVE_RAY, reason="ray is installed")
def test_a_missing_ray_is_told_with_its_extra() -> None:
    ran = runner.invoke(app, ["serve", "--ray"])
    assert ran.exit_code == 2 and "foretoken[ray]" in ran.stderr


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ray's own use of pydantic
@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--replicas", "0"], "replicas"),
        (["--max-replicas", "1"], "max_replicas"),
        (["--threads", "0"], "threads"),
        (["--metrics-port", "65535"], "metrics_port"),
        (["--device", "cuda:1"], "--device cuda"),
    ],
)
def test_sizes_are_refused_before_a_cluster_is_joined(flags, word) -> None:
    ran = runner.invoke(app, ["serve", "--ray", "--port", "0", *flags])
    assert ran.exit_code == 2 and word in ran.stderr
