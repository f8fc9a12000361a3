"""Several processes train as one with the larger batch; a killed command ends as if unbroken."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from uneven import run, texts

import foretoken
from foretoken.cli import options as o
from foretoken.cli.train import cook_recipe
from foretoken.errors import ConfigError
from foretoken.training import recipes
from foretoken.training.dataset.making import DataConfig, make_data
from foretoken.training.dataset.stream import ChatStream
from foretoken.training.drafts.making import DraftConfig, make_draft

TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CONFIG = DraftConfig(
    shape=(64, 1), vocabulary=200, epochs=3.0, minutes=None, tokens=128, row_tokens=64,
    evaluations=3, held_out=4, precision="no",
)  # fmt: skip


def close(one, other):
    assert [step for step, _ in one] == [step for step, _ in other]
    for (_, a), (_, b) in zip(one, other, strict=True):
        assert a == pytest.approx(b, abs=2e-5)


@pytest.fixture
def doubled(tmp_path):
    """The run of one process with batches twice as large."""
    (tmp_path / "texts").mkdir()
    texts(tmp_path / "texts")
    return run(tmp_path, doubled=True)[0]


def test_two_processes_have_the_curve_of_one_with_the_doubled_batch(doubled, tmp_path):
    command = [sys.executable, *TWO, str(Path(__file__).parent / "uneven.py"), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, timeout=240, env=one_thread())
    assert ran.returncode == 0, ran.stderr.decode()
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["processes"] == 2
    close(told["train"], doubled.train)
    close(told["held_out"], doubled.held_out)


def test_accumulated_batches_have_the_curve_of_the_doubled_batch(doubled, tmp_path):
    accumulated, _ = run(tmp_path, doubled=False, accumulate=2)
    close(accumulated.train, doubled.train)
    close(accumulated.held_out, doubled.held_out)


@pytest.fixture(scope="module")
def session(tiny_pair, byte_tokenizer):
    with foretoken.load(tiny_pair[0], "plain", tokenizer=byte_tokenizer) as made:
        yield made


@pytest.fixture(scope="module")
def data(session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    config = DataConfig(
        shard=60, new_tokens=24, held_out=0.2, laws=6, repeated=1.0, temperatures=(0.0, 1.0)
    )
    given = [f"in the {n} rain on the {n * 7 % 13} train" for n in range(60)]
    make_data(session, config, folder, given, show=False)
    return folder


def one_thread():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def train_draft(pair_folders, data, out, *settings):
    """The command line of CONFIG."""
    told = ["shape=64,1", "vocabulary=200", "epochs=3.0", "minutes=none", "tokens=128",
            "row_tokens=64", "evaluations=3", "held_out=4", "precision=no", *settings]  # fmt: skip
    flags = [flag for one in told for flag in ("--set", one)]
    where = ["--target", str(pair_folders[0]), "--data", str(data), "--out", str(out)]
    return ["-m", "foretoken", "train", "draft", *where, *flags, "--json"]


@pytest.mark.slow
def test_the_command_is_run_by_two_processes_and_written_once(pair_folders, data, tmp_path):
    command = [sys.executable, *TWO, *train_draft(pair_folders, data, tmp_path)]
    ran = subprocess.run(command, capture_output=True, timeout=240, env=one_thread(), text=True)
    assert ran.returncode == 0, ran.stderr
    notes = json.loads(ran.stdout)  # of one process only
    assert notes == json.loads((tmp_path / "card.json").read_text())
    assert notes["held_out"][-1][1] < notes["first_loss"]
    stream = ChatStream(data, "train", tokens=128, row_tokens=64, pad=0, seed=0)
    read = (stream.batch(i)["lengths"] for i in range(2 * notes["steps"]))
    assert notes["tokens"] == sum(int(one.sum()) for one in read), "batches of both count"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.hidden_size == 64
    assert (tmp_path / "loss.png").is_file()


@pytest.mark.slow
def test_a_killed_command_ends_with_the_same_loss(session, pair_folders, data, tmp_path):
    """SIGKILL in the middle of a real run, at whatever step it has come to."""
    unbroken = make_draft(session, CONFIG, data, tmp_path / "unbroken", show=False)
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, *train_draft(pair_folders, data, out)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=one_thread(),
    )  # fmt: skip
    try:
        saved = waited_for(out, process)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "config.json").exists()
    assert saved < unbroken["steps"]
    resumed = make_draft(session, CONFIG, data, out, show=False)
    assert resumed["steps"] == unbroken["steps"]
    for (_, one), (_, other) in zip(resumed["held_out"], unbroken["held_out"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    figures = [
        [told["acceptance"] for _, told in notes["measured"]] for notes in (resumed, unbroken)
    ]
    assert figures[0] == pytest.approx(figures[1], abs=0.02)


def waited_for(out, process):
    """The step of the first checkpoint that a run saves, some steps after it."""
    until = time.monotonic() + 200
    while time.monotonic() < until and process.poll() is None:
        if found := sorted(out.glob("training/*/run/step-*.pt")):
            time.sleep(random.uniform(0.0, 0.05))
            return int(found[0].stem.removeprefix("step-"))
        time.sleep(0.002)
    raise AssertionError(f"no checkpoint before the run ended with {process.poll()}")


def test_what_would_be_done_twice_is_refused_to_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipes.check_processes("draft")
    for name in ("data", "online", "acceptance"):
        with pytest.raises(ConfigError, match=r"trained by several: draft"):
            recipes.check_processes(name)


@pytest.mark.parametrize(
    ("asked", "gpus", "world", "expected"),
    [(None, True, "2", "cuda:1"), ("cuda:0", True, "2", "cuda:0"), (None, False, "2", None),
     (None, True, "1", None)],
)  # fmt: skip
def test_each_process_has_its_target_on_a_gpu_of_its_own(
    asked, gpus, world, expected, pair_folders, data, tmp_path, monkeypatch
):
    seen = []

    def opened(**options):
        seen.append(options["device"])
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(o, "open_session", opened)
    for name, value in (("WORLD_SIZE", world), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyboardInterrupt):
        cook_recipe(
            "draft", CONFIG, tmp_path, target=str(pair_folders[0]), draft=None, data=data, text=(),
            fresh=False, json_=True, device=asked, dtype=None,
        )  # fmt: skip
    assert seen == [expected]
