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
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from live_server import wait_for
from typer.testing import CliRunner

from foretoken.cli import app
from foretoken.cli.serve import whole_paths
from foretoken.errors import ConfigError
from foretoken.serve.settings import Settings

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
    ("asked", "gpus", "ours", "wanted"),
    [
        ("cpu", 4, True, "cpu"),
        ("cuda", 0, True, "refused"),
        ("cuda", 1, True, "refused"),
        ("cuda", 2, True, "cuda"),
        ("cuda", 0, False, "cuda"),  # clusters of others may grow
        (None, 0, True, None),
        (None, 2, True, "cuda"),
        (None, 1, True, "refused"),
    ],
)
def test_replicas_run_where_the_cluster_has_room_for_each(asked, gpus, ours, wanted) -> None:
    from foretoken.serve.scale import Scale, device_of

    if wanted == "refused":
        room = "--replicas 1, or --device cpu" if gpus else "pass --device cpu"
        with pytest.raises(ConfigError, match=room):
            device_of({"device": asked}, Scale(replicas=2), gpus, ours)
    else:
        assert device_of({"device": asked}, Scale(replicas=2), gpus, ours) == wanted


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ray's own use of pydantic
def test_replicas_share_the_cores_that_the_process_may_use(monkeypatch) -> None:
    from foretoken.serve import scale

    told = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(scale.CLUSTER, "init", lambda **options: told.append(options["num_cpus"]))
    size = scale.Scale(replicas=2)
    assert size.cores == 2
    assert scale.join(size) and told == [4]


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


@pytest.fixture
def joined(monkeypatch):
    """A Ray cluster of others, as far as a server asks it for anything: what is served there, where
    its Serve listens (None: there is none), and what was run and taken away.
    """
    from foretoken.serve import scale

    there = SimpleNamespace(applications={}, listens=None, ran=[], left=[])

    def run(application, name):
        there.ran.append(name)
        there.applications[name] = application

    def delete(name):
        there.left.append(name)
        there.applications.pop(name, None)

    def client(raise_if_no_controller_running):
        return there.listens and SimpleNamespace(http_config=there.listens)

    monkeypatch.setenv("RAY_ADDRESS", "there:6379")
    monkeypatch.setattr(scale, "application", lambda *given: None)
    monkeypatch.setattr(scale.context, "_get_global_client", client)
    monkeypatch.setattr(scale.CLUSTER, "init", lambda **options: None)
    monkeypatch.setattr(scale.CLUSTER, "shutdown", lambda: there.left.append("cluster"))
    monkeypatch.setattr(scale.serve, "start", lambda **options: None)
    monkeypatch.setattr(scale.serve, "run", run)
    monkeypatch.setattr(scale.serve, "delete", delete)
    monkeypatch.setattr(scale.serve, "status", lambda: there)
    monkeypatch.setattr(scale.serve, "shutdown", lambda: there.left.append("serve"))
    return there


def begin_at(port):
    """Serve from the cluster that was joined; what was started there."""
    from foretoken.serve import scale

    return scale.begin({}, Settings(), scale.Scale(), "127.0.0.1", port)


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ray's own use of pydantic
@pytest.mark.parametrize("where", ["start", "run"])
def test_an_interrupt_while_replicas_load_leaves_nothing_on_the_cluster(
    joined, monkeypatch, where
) -> None:
    from foretoken.serve import scale

    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(scale.serve, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin_at(0)
    assert joined.left == [scale.NAME, "serve", "cluster"]


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ray's own use of pydantic
@pytest.mark.parametrize(
    ("name", "port", "told"),
    [
        ("foretoken", 8000, "end the other `foretoken serve --ray`"),
        ("other", 8100, "pass --host 127.0.0.1 --port 8100"),
    ],
)
def test_a_second_server_on_a_cluster_leaves_the_first_alone(joined, name, port, told) -> None:
    joined.applications[name] = "theirs"
    joined.listens = SimpleNamespace(host="127.0.0.1", port=port)
    with pytest.raises(ConfigError, match=told):
        begin_at(8000)
    assert joined.ran == [] and joined.left == ["cluster"]
    assert joined.applications == {name: "theirs"}


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ray's own use of pydantic
@pytest.mark.parametrize("others", [[], ["other"]])
def test_a_serve_that_we_started_ends_with_the_last_application(joined, others) -> None:
    from foretoken.serve import scale

    started = begin_at(0)
    assert joined.ran == [scale.NAME] and joined.left == []
    joined.applications.update(dict.fromkeys(others))
    scale.end(started)
    assert joined.left == [scale.NAME, *([] if others else ["serve"]), "cluster"]


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ray's own use of pydantic
def test_a_serve_that_listens_where_it_was_asked_for_is_shared_and_stays(joined) -> None:
    from foretoken.serve import scale

    with socket.socket() as theirs:
        theirs.bind(("127.0.0.1", 0))
        theirs.listen()
        port = theirs.getsockname()[1]
        joined.listens = SimpleNamespace(host="127.0.0.1", port=port)
        started = begin_at(port)
    assert started.url == f"http://127.0.0.1:{port}"
    scale.end(started)
    assert joined.left == [scale.NAME, "cluster"]


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ray's own use of pydantic
def test_replicas_are_told_whole_paths(monkeypatch, tmp_path) -> None:
    """They start in another folder, where org/name would be one of the hub."""
    from foretoken.serve import scale

    told = []

    def begin(loading, settings, *more):
        told.extend([loading, settings])
        return scale.Started(cluster=True, serve=True, url="http://127.0.0.1:8000")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.setattr(scale, "begin", begin)
    monkeypatch.setattr(scale, "wait", lambda: None)
    monkeypatch.setattr(scale, "end", lambda started: None)
    asked = ["--target", "org/name", "--draft", "org/small", "--log-file", "log.jsonl"]
    ran = runner.invoke(app, ["serve", "--ray", "--port", "0", *asked])
    assert ran.exit_code == 0, ran.output
    loading, settings = told
    assert loading["target"] == str(tmp_path / "org" / "name")
    assert loading["draft"] == "org/small"  # of the hub: nothing here has that name
    assert settings.log_file == tmp_path / "log.jsonl"


def test_only_what_names_a_place_becomes_a_whole_path(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("store", "chain", "off", "text-target", "cpu"):
        (tmp_path / name).mkdir()
    plain = {"target": "text-target", "draft_vocabulary": "off", "draft": None, "max_rows": 4}
    plain |= {"method": "chain", "device": "cpu"}
    given = {**plain, "datastore": "store", "tuned": Path("store")}
    loading, settings = whole_paths(given, Settings(log_file=Path("-")))
    store = tmp_path / "store"
    assert loading == {**plain, "datastore": str(store), "tuned": store}
    assert settings.log_file == Path("-") and given["datastore"] == "store"


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
