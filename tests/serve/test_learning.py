"""A server whose draft learns in idle moments: texts stay, work comes first, nothing is lost."""

import shutil
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest
from live_server import running, wait_for

import foretoken
from foretoken.engine.scheduling import held
from foretoken.serve import engine_thread
from foretoken.training.online.serving import IdleLearning, ServingSettings

SOON = {"rate": 1e-3, "texts": 4, "save_every": 0.0}
PROMPTS = [f"{word} and" for word in ("one", "two", "three", "four", "five", "six", "seven")]


@contextmanager
def learning_server(make_session, folder, **settings):
    with make_session("chain", controller="fixed", depth=4) as session:
        learning = IdleLearning(session, folder, ServingSettings(**{**SOON, **settings}))
        with running(session, learning=learning) as server:
            server.learning = learning
            yield server
        learning.finish()


def texts(server):
    found = []
    for prompt in PROMPTS:
        answer = server.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": 24, "temperature": 0}
        )
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["text"])
    return found


@pytest.fixture(scope="module")
def right(served):
    return texts(served)


def at_rest(server):
    """Wait until all that was heard is learned; between two slices, not within one."""
    online = server.learning.online

    def done():
        with held(server.session.scheduler.turns):
            return online.steps > 0 and online.work is None and online.learners[0].left < 1

    wait_for(done)


def test_texts_stay_while_idle_moments_teach_the_draft(make_session, tmp_path, right):
    with learning_server(make_session, tmp_path) as server:
        assert texts(server) == right
        at_rest(server)
        assert server.metric("learning_requests_total") == len(PROMPTS)
        steps = server.metric("learning_steps_total")
        assert steps > 0 and server.metric("learning_ended") == 0
        assert server.metric("learning_seconds_total") > 0
        assert 0 <= server.metric("learning_acceptance") <= 1
        assert texts(server) == right
        at_rest(server)
        assert server.metric("learning_steps_total") > steps


def test_a_restart_goes_on_and_the_learned_draft_is_a_model(
    make_session, tmp_path, right, tiny_pair, chatty
):
    with learning_server(make_session, tmp_path) as server:
        texts(server)
        at_rest(server)
        steps = server.learning.online.steps
    with learning_server(make_session, tmp_path) as server:
        assert server.learning.resumed and server.learning.online.steps == steps
        assert f"after {steps:,} steps" in str(server.learning)
        assert texts(server) == right
    with foretoken.load(tiny_pair[0], "chain", tmp_path / "draft", chatty, depth=4) as session:
        found = session.generate(PROMPTS[0], 24, temperature=0.0)
        assert session.tokenizer.decode(found.tokens) == right[0]


def test_a_request_waits_for_a_slice_and_not_for_all_that_is_left(
    make_session, tmp_path, right, monkeypatch
):
    """Work that would take minutes: what is asked meanwhile is answered at once."""
    monkeypatch.setattr(engine_thread, "QUIET", 0.01)
    with learning_server(make_session, tmp_path, passes=1e6) as server:
        assert texts(server) == right
        wait_for(lambda: server.learning.online.steps > 2)
        assert texts(server) == right
        assert server.learning.online.learners[0].left > 1000


def test_a_folder_that_cannot_be_written_any_more_ends_nothing(
    make_session, tmp_path, right, caplog
):
    folder = tmp_path / "learned"
    with learning_server(make_session, folder) as server:
        shutil.rmtree(folder)
        folder.write_text("in the way")
        assert texts(server) == right
        wait_for(lambda: "could not be saved" in caplog.text)
        assert texts(server) == right
        assert server.learning.online.failure is None


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_served(make_session, tmp_path):
    (tmp_path / "file").write_text("")
    with (
        make_session("chain") as session,
        pytest.raises(foretoken.errors.CheckpointError, match="cannot be written"),
    ):
        IdleLearning(session, tmp_path / "file" / "inside")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--learn-set", "rate=1e-3"], "without --learn"),
        (["--learn", "out", "--ray"], "every replica"),
        (["--learn", "out", "--memory-budget", "1GiB"], "in no plan"),
        (["--learn", "out", "--learn-set", "speed=3", "--method", "chain"], "'speed'"),
        (["--learn", "out", "--method", "suffix"], "with a draft"),
    ],
)
def test_what_learning_does_not_go_with_is_refused(options, told, tmp_path):
    command = [sys.executable, "-m", "foretoken", "serve", "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    words = " ".join(ended.stderr.replace("│", " ").split())
    assert ended.returncode == 2 and told in words, ended.stderr


def test_the_command_learns_and_says_so(tmp_path):
    """A real process: it learns from one request, and SIGTERM leaves a state and a draft."""
    folder = tmp_path / "learned"
    command = [
        sys.executable, "-m", "foretoken", "serve", "--port", "0", "--method", "chain",
        "--learn", str(folder), "--learn-set", "texts=1", "--learn-set", "save_every=0",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            told = ""
            while "learns" not in told:
                line = process.stderr.readline()
                assert line, told
                told += line
            url = told.split(" at ")[1].split("/v1")[0]
            body = {"prompt": "the cat sat on", "max_tokens": 40, "temperature": 0}
            wait_for(lambda: alive(url))
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
            wait_for(lambda: steps_of(url) > 0)
        finally:
            process.terminate()
            process.wait(60)
    assert (folder / "draft" / "model.safetensors").is_file()
    assert len(list(folder.iterdir())) > 1


def alive(url):
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def steps_of(url):
    text = httpx.get(f"{url}/metrics", timeout=5).text
    [line] = [one for one in text.splitlines() if one.startswith("foretoken_learning_steps_total ")]
    return float(line.split()[1])
