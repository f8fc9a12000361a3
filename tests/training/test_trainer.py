"""The training loop: exact resume after a kill, and ends that leave the last good checkpoint."""

import math
import os
import resource
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toy import objective, trainer

from foretoken.errors import CheckpointError, ConfigError
from foretoken.training import checkpoint
from foretoken.training import trainer as loop
from foretoken.training.dataset.records import Chat, Laws, write_shard
from foretoken.training.dataset.stream import ChatStream
from foretoken.training.schedule import cosine


def test_a_killed_run_ends_with_the_same_weights(tmp_path):
    straight, model = trainer(tmp_path / "straight")
    whole = straight.run(show=False)
    command = [
        sys.executable,
        str(Path(__file__).parent / "toy.py"),
        str(tmp_path / "killed"),
        "35",
    ]
    killed = subprocess.run(command, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert checkpoint.latest(tmp_path / "killed").name == "step-00000015.pt"  # batch 35 is step 18

    resumed, again = trainer(tmp_path / "killed")
    with torch.no_grad():  # the checkpoint must supply everything
        for weight in again.parameters():
            weight.fill_(0.5)
    rest = resumed.run(show=False)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert rest.train == whole.train
    assert rest.held_out == whole.held_out
    assert rest.tokens == whole.tokens


def test_training_learns_and_draws_its_curve(tmp_path):
    run, _ = trainer(tmp_path, steps=60)
    progress = run.run(show=False)
    assert progress.train[-1][1] < 0.8 * progress.train[0][1]
    assert progress.ended == "steps"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "loss.png", "step-00000060.pt"]


def test_a_nan_keeps_the_last_good_checkpoint(tmp_path):
    calls = []

    def breaks(model, batch, rng):
        calls.append(1)
        loss, metrics = objective(model, batch, rng)
        return (loss * math.nan, metrics) if len(calls) == 39 else (loss, metrics)

    run, _ = trainer(tmp_path, loss=breaks)
    with pytest.raises(CheckpointError, match=r"nan(.|\n)*step-00000015") as caught:
        run.run(show=False)
    assert "lower learning rates" in caught.value.do
    state = checkpoint.load(checkpoint.latest(tmp_path))
    assert all(torch.isfinite(weight).all() for weight in state["model"].values())
    again, _ = trainer(tmp_path)
    assert again.run(show=False).step == 24


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path):
    """A limit on file size stands for the disk: the write itself fails, half way through."""
    run, _ = trainer(tmp_path, steps=5)
    run.run(show=False)
    before = checkpoint.latest(tmp_path).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        more, _ = trainer(tmp_path, steps=10)
        with pytest.raises(CheckpointError, match=r"step-00000005") as caught:
            more.run(show=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "free disk space" in caught.value.do
    assert checkpoint.latest(tmp_path).read_bytes() == before
    assert not (tmp_path / ".partial").exists()


def test_early_stop_after_patience_runs_out(tmp_path):
    run, _ = trainer(
        tmp_path, steps=500, evaluate_every=1, patience=3, matrix_rate=0.0, vector_rate=0.0,
        embedding_rate=0.0,
    )  # fmt: skip
    progress = run.run(show=False)
    assert progress.ended == "patience"
    assert progress.step == 4  # the first is the best, three do not improve on it


def test_gradients_accumulate_over_batches(tmp_path):
    """Two batches in one step: the gradient is their mean, so one step of AdamW sees both."""
    seen = []

    class Counting:
        def __init__(self, stream):
            self.stream = stream

        def batch(self, index):
            seen.append(index)
            return self.stream.batch(index)

    run, _ = trainer(tmp_path, steps=3, save_every=10)
    run.stream = Counting(run.stream)
    assert run.run(show=False).step == 3
    assert seen == [0, 1, 2, 3, 4, 5]


class Hearing:
    """An objective that changes along the run, and a kill in one of its steps."""

    def __init__(self, killed=None):
        self.heard, self.killed = [], killed

    def reach(self, done):
        self.heard.append(done)

    def __call__(self, model, batch, rng):
        if len(self.heard) == self.killed:
            raise KeyboardInterrupt
        return objective(model, batch, rng)


def test_an_objective_hears_before_each_step_how_much_is_over(tmp_path):
    plan = {"steps": 8, "save_every": 2, "evaluate_every": 8}
    hearing = Hearing(killed=6)
    run, _ = trainer(tmp_path, loss=hearing, **plan)
    with pytest.raises(KeyboardInterrupt):
        run.run(show=False)
    assert hearing.heard == [step / 8 for step in range(6)]
    hearing = Hearing()
    trainer(tmp_path, loss=hearing, **plan)[0].run(show=False)
    assert hearing.heard == [step / 8 for step in range(4, 8)], "on from the checkpoint"


def test_a_broken_or_foreign_checkpoint_is_named(tmp_path):
    run, _ = trainer(tmp_path, steps=5)
    run.run(show=False)
    path = checkpoint.latest(tmp_path)
    state = checkpoint.load(path)
    torch.save(state | {"model": {"other": torch.ones(1)}}, path)
    with pytest.raises(CheckpointError, match="another model or plan"):
        trainer(tmp_path)[0].run(show=False)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        trainer(tmp_path)[0].run(show=False)


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        trainer(tmp_path / "file" / "run")[0].run(show=False)


def test_the_rate_warms_up_and_falls_to_its_floor():
    rates = [cosine(step, 100, 10, 0.1) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_gradient_that_is_no_number_is_never_saved(tmp_path):
    """The loss is one; the step after which it would not be is one that saves."""
    calls = []

    def breaks(model, batch, rng):
        calls.append(1)
        loss, metrics = objective(model, batch, rng)
        if len(calls) == 40:  # of step 20
            loss = loss + 0.0 * torch.sqrt(model.table.weight[0, 0] - model.table.weight[0, 0])
        return loss, metrics

    run, _ = trainer(tmp_path, loss=breaks)
    with pytest.raises(CheckpointError, match=r"norm of the gradients(.|\n)*step-00000015"):
        run.run(show=False)
    state = checkpoint.load(checkpoint.latest(tmp_path))
    assert all(torch.isfinite(weight).all() for weight in state["model"].values())


def test_a_disk_without_links_keeps_the_best_all_the_same(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError("operation not supported")

    monkeypatch.setattr(os, "link", refused)
    run, _ = trainer(tmp_path, steps=60)
    progress = run.run(show=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "loss.png", "step-00000060.pt"]
    assert checkpoint.load(tmp_path / "best.pt")["progress"]["best"] == progress.best


def test_the_best_weights_are_there_before_a_step_says_so(tmp_path, monkeypatch):
    """A run is killed between two files: what is gone on with never lacks its best one."""
    replace, killed = os.replace, []

    def dies(source, target):
        if Path(target).name == "step-00000002.pt":
            killed.append(target)
            raise OSError("killed")
        replace(source, target)

    checkpoint.save(tmp_path, 1, {"x": torch.zeros(1)}, best=True)
    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(CheckpointError):
        checkpoint.save(tmp_path, 2, {"x": torch.ones(1)}, best=True)
    assert killed and checkpoint.latest(tmp_path).name == "step-00000001.pt"
    assert checkpoint.load(tmp_path / "best.pt")["x"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "step-00000001.pt"]


def test_a_checkpoint_that_a_kill_left_half_done_shares_nothing_with_the_best(tmp_path):
    """Killed behind the best one's link: what was written is both."""
    state = {"model": {"weight": torch.ones(3)}}
    checkpoint.save(tmp_path, 1, state, best=True)
    os.replace(tmp_path / "step-00000001.pt", tmp_path / ".partial")
    before = (tmp_path / "best.pt").read_bytes()
    checkpoint.save(tmp_path, 2, {"model": {"weight": torch.zeros(3)}}, best=False)
    assert (tmp_path / "best.pt").read_bytes() == before


RARE = {"save_every": 1000, "evaluate_every": 1000}


@pytest.fixture
def ctrl_c():
    """Sends it to this process, which hears it whatever runs the tests has made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


class Pressed:
    """An objective in whose call `at` Ctrl-C is pressed so many times."""

    def __init__(self, press, at, times=1):
        self.press, self.at, self.times, self.calls = press, at, times, 0

    def __call__(self, model, batch, rng):
        self.calls += 1
        for _ in range(self.times if self.calls == self.at else 0):
            self.press()
        return objective(model, batch, rng)


def test_ctrl_c_keeps_the_step_it_came_in(ctrl_c, tmp_path, caplog):
    """Of two batches a step: the ninth is in the middle of step 5, which is whole when it ends."""
    straight, model = trainer(tmp_path / "straight", **RARE)
    whole = straight.run(show=False)
    stopped, _ = trainer(tmp_path / "stopped", loss=Pressed(ctrl_c, 9), **RARE)
    with pytest.raises(KeyboardInterrupt):
        stopped.run(show=False)
    assert checkpoint.latest(tmp_path / "stopped").name == "step-00000005.pt"
    assert "goes on from step 5" in caplog.text
    resumed, again = trainer(tmp_path / "stopped", **RARE)
    assert resumed.run(show=False).train == whole.train
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_a_second_ctrl_c_does_not_wait_and_saves_nothing_half_done(ctrl_c, tmp_path):
    pressed = Pressed(ctrl_c, 9, times=2)
    run, _ = trainer(tmp_path, loss=pressed, **RARE | {"save_every": 2})
    with pytest.raises(KeyboardInterrupt):
        run.run(show=False)
    assert pressed.calls == 9
    assert checkpoint.latest(tmp_path).name == "step-00000004.pt"


def test_ctrl_c_in_the_last_step_is_not_lost(ctrl_c, tmp_path):
    run, _ = trainer(tmp_path, loss=Pressed(ctrl_c, 8), steps=4, **RARE)
    with pytest.raises(KeyboardInterrupt):
        run.run(show=False)
    assert checkpoint.latest(tmp_path).name == "step-00000004.pt"


def test_a_long_time_without_a_checkpoint_ends_with_one(tmp_path, monkeypatch):
    """A clock on which every step takes half of what may lie between two of them."""
    ticks = count(0.0, 0.1)
    clock = SimpleNamespace(monotonic=lambda: next(ticks))
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(loop, "_SECONDS_BETWEEN_SAVES", 1.0)
    saved, save = [], checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda folder, step, *given, **named: (
            saved.append(step), save(folder, step, *given, **named))
    )  # fmt: skip
    straight, model = trainer(tmp_path / "straight", **RARE)
    straight.run(show=False)
    assert len(saved) > 3 and saved[0] < 10 and saved[-1] == 24
    hearing = Hearing(killed=12)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "killed", loss=hearing, **RARE)[0].run(show=False)
    assert checkpoint.latest(tmp_path / "killed")
    resumed, again = trainer(tmp_path / "killed", **RARE)
    resumed.run(show=False)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_a_run_that_time_ends_is_judged_as_often_as_one_that_steps_end(tmp_path, monkeypatch):
    """A second a step on this clock, so that forty of the thousand steps are taken."""
    ticks = count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    plan = {"steps": 1000, "save_every": 1000, "evaluate_every": 50}
    progress = trainer(tmp_path, seconds=40.0, **plan)[0].run(show=False)
    assert progress.ended == "time" and progress.step == 40
    assert [step for step, _ in progress.held_out] == list(range(2, 41, 2))


def test_a_run_that_steps_end_is_judged_by_steps_whatever_its_limit(tmp_path):
    progress = trainer(tmp_path, seconds=3600.0)[0].run(show=False)
    assert [step for step, _ in progress.held_out] == [6, 12, 18, 24]


def test_tokens_are_counted_without_padding(tmp_path):
    chats = [Chat("given", 0.0, [1, 2, 3], [4] * answer) for answer in (2, 5, 9)]
    told = [(chat, Laws.none(len(chat.answer))) for chat in chats]
    write_shard(tmp_path, 0, {"train": told, "valid": []})
    stream = ChatStream(tmp_path, "train", tokens=48, row_tokens=16, pad=0, seed=0, packed=False)
    run, _ = trainer(tmp_path / "run", stream, steps=1, accumulate=1)
    assert run.run(show=False).tokens == 5 + 8 + 12


def test_where_a_run_is_at_work_another_is_refused(tmp_path):
    refused = []

    def begins_another(model, batch, rng):
        with pytest.raises(ConfigError, match="another run is at work there") as caught:
            trainer(tmp_path)[0].run(show=False)
        refused.append(caught.value)
        raise KeyError("it fails")

    with pytest.raises(KeyError):
        trainer(tmp_path, loss=begins_another)[0].run(show=False)
    assert refused and not list(tmp_path.iterdir())
    assert trainer(tmp_path)[0].run(show=False).step == 24, "whatever ended the first"
