"""A server whose draft learns in idle moments: texts stay, work comes first, nothing is lost."""

import shutil
import subprocess
import sys
from contextlib import contextmanager
from time import monotonic, sleep

import httpx
import pytest
from live_server import running, wait_for
from typer.testing import CliRunner

import foretoken
from foretoken.cli import app as cli
from foretoken.engine.scheduling import held
from foretoken.serve import engine_thread
from foretoken.training import checkpoint
from foretoken.training.online.giving_way import never
from foretoken.training.online.serving import IdleLearning, ServingSettings

SOON = {"rate": 1e-3, "texts": 4, "save_every": 0.0, "begin": 1, "trial": 0}
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


@pytest.mark.slow
def test_a_request_waits_for_a_slice_and_not_for_all_that_is_left(
    make_session, tmp_path, right, monkeypatch
):
    """Slices of a fifth of a second, and work for hours: requests wait for one slice each."""
    monkeypatch.setattr(engine_thread, "QUIET", 0.01)
    with learning_server(make_session, tmp_path, passes=1e6) as server:
        online, waited = server.learning.online, []
        slice_ = online.slice

        def slow():
            sleep(0.2)
            return slice_()

        monkeypatch.setattr(online, "slice", slow)
        assert texts(server) == right
        wait_for(lambda: online.steps > 1)
        slices = []

        def counted():
            if server.service.places:  # nobody waits for one begun between two requests
                slices.append(1)
            return slow()

        monkeypatch.setattr(online, "slice", counted)
        for _ in range(5):
            before = len(slices)
            texts(server)
            waited.append(len(slices) - before)
        assert max(waited) <= 2 * len(PROMPTS), "at most one under way when each request came"
        assert online.learners[0].left > 1000


def test_an_error_in_an_idle_moment_ends_learning_and_nothing_else(
    make_session, tmp_path, right, monkeypatch
):
    with learning_server(make_session, tmp_path) as server:

        def broken(disturbed):
            raise KeyError("nobody expected this")

        server.service.thread.rest = broken
        assert texts(server) == right
        wait_for(lambda: server.service.thread.rest is None)
        assert texts(server) == right and server.service.healthy
        assert server.metric("engine_errors_total") == 1


def test_two_servers_do_not_keep_their_drafts_in_one_folder(make_session, tmp_path):
    with (
        learning_server(make_session, tmp_path),
        make_session("chain") as session,
        pytest.raises(foretoken.errors.ConfigError, match="another server"),
    ):
        IdleLearning(session, tmp_path)


def test_another_draft_does_not_go_on_where_one_has_learned(
    make_session, tmp_path, tiny_pair, chatty, right
):
    with learning_server(make_session, tmp_path) as server:
        texts(server)
        at_rest(server)
    with (
        foretoken.load(tiny_pair[0], "chain", tmp_path / "draft", chatty) as session,
        pytest.raises(foretoken.errors.ConfigError, match="another draft learned there"),
    ):
        IdleLearning(session, tmp_path)


def test_a_seed_repeats_a_text_only_under_one_fingerprint(make_session, tmp_path):
    ask = {"prompt": "a", "max_tokens": 2}

    def fingerprint(server):
        return server.post("/v1/completions", json=ask).json()["system_fingerprint"]

    with learning_server(make_session, tmp_path) as server:
        first = fingerprint(server)
        assert first == "chain+0-lossless"
        texts(server)
        at_rest(server)
        assert fingerprint(server) != first


def test_weights_on_trial_are_learned_on_but_do_not_guess(make_session, tmp_path, right):
    """More texts are wanted than come: what guesses stays, and so does what a seed repeats."""
    with learning_server(make_session, tmp_path, trial=500) as server:
        assert texts(server) == right
        at_rest(server)
        assert server.metric("learning_steps_total") > 0
        assert server.metric("learning_served_steps") == 0
        answer = server.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.json()["system_fingerprint"] == "chain+0-lossless"
    assert not (tmp_path / "draft").exists(), "nothing better than what it began as was learned"


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
def test_what_learning_does_not_go_with_is_refused(options, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(cli, ["serve", "--port", "0", *options])
    words = " ".join(ended.output.replace("│", " ").split())
    assert ended.exit_code == 2 and told in words, ended.output


def test_the_command_learns_and_says_so(tmp_path):
    """A real process: it learns from one request, and SIGTERM leaves a state and a draft."""
    folder = tmp_path / "learned"
    command = [
        sys.executable, "-m", "foretoken", "serve", "--port", "0", "--method", "chain",
        "--learn", str(folder), "--learn-set", "texts=1", "--learn-set", "save_every=0",
        "--learn-set", "begin=1", "--learn-set", "trial=0",
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
            wait_for(lambda: served_steps_of(url) > 0)
        finally:
            process.terminate()
            assert process.wait(60) == 0
    assert (folder / "draft" / "model.safetensors").is_file()
    state = checkpoint.load(checkpoint.latest(folder))
    assert state["learners"][0]["steps"] > 0


def alive(url):
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def served_steps_of(url):
    text = httpx.get(f"{url}/metrics", timeout=60).text
    [line] = [
        one for one in text.splitlines() if one.startswith("foretoken_learning_served_steps ")
    ]
    return float(line.split()[1])


def test_a_request_breaks_a_slice_off(make_session, tmp_path, right):
    """A slice without an end, which asks between two layers whether somebody waits."""
    with learning_server(make_session, tmp_path) as server:
        learner, asked = server.learning.online.learners[0], []

        def endless(part, places):
            while learner.way.disturbed is not never:
                asked.append(1)
                learner.way.look()
                sleep(0.001)
            return 0.0

        learner.gradients = endless
        texts(server)
        wait_for(lambda: len(asked) > 100)
        began = monotonic()
        assert texts(server) == right
        assert learner.way.given_up >= 1 and monotonic() - began < 30.0
