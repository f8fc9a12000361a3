"""Decision models: they learn from captures, resume, and serve the method they are for."""

import pytest
import torch
from killed_acceptance import VOCAB, prompts, session, some

from foretoken.audit.rows import seeded_rows, write
from foretoken.engine.assemble import assemble
from foretoken.errors import ConfigError
from foretoken.heads import store
from foretoken.training import features
from foretoken.training.heads import run_training
from foretoken.training.objectives.decision import DecisionTraining
from foretoken.types import SamplingParams


def train(out, **changes):
    small = {"prompts": 40, "new_tokens": 12, "seed": 3, "steps": 300, "rate": 1e-2}
    config = DecisionTraining(**small | changes)
    return run_training(session(), "decision", prompts, config, out, show=False)


def test_training_lowers_the_held_out_loss(tmp_path):
    found = train(tmp_path)
    after = found["figures"]["trained"]
    assert after["divergence"] < 0.8 * found["untrained"]["divergence"]
    assert min(loss for _, loss in found["held_out"][1:]) < found["held_out"][0][1]
    assert found["tokens"] == {"train": 480, "valid": 144}, "every guess is kept"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_hard_model_tells_best_tokens_from_others(tmp_path):
    """Classes are balanced, so always naming the more frequent one would be right half the time."""
    found = train(tmp_path, model="hard")
    assert found["held_out"][-1][1] < found["held_out"][0][1]
    assert found["figures"]["trained"]["right"] > found["untrained"]["right"]


def test_soft_and_hard_share_what_was_collected(tmp_path):
    train(tmp_path, steps=5)
    shards = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("capture/*.safetensors")}
    train(tmp_path, steps=5, model="hard")
    assert store.load(tmp_path, "decision")[0].model == "hard"
    again = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("capture/*.safetensors")}
    assert shards and again == shards


def test_a_run_that_broke_off_ends_with_the_same_head(tmp_path, monkeypatch):
    train(tmp_path / "straight", steps=40)
    batch = features.Shuffled.batch

    def breaks(stream, index):
        if index == 27:
            raise KeyboardInterrupt
        return batch(stream, index)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(features.Shuffled, "batch", breaks)
        train(tmp_path / "broken", steps=40)
    assert list((tmp_path / "broken").rglob("step-*.pt"))
    train(tmp_path / "broken", steps=40)
    one, other = (store.load(tmp_path / name, "decision")[0] for name in ("straight", "broken"))
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name


def test_a_trained_head_serves_the_dynamic_trees(tmp_path):
    train(tmp_path, steps=40)
    pair = session()
    built = assemble("mcsd-dynamic", pair.target, pair.draft, head=str(tmp_path), k=1)
    params = SamplingParams(max_new_tokens=20)
    rows = seeded_rows(some(3), params, VOCAB)
    plain = write(assemble("plain", pair.target), seeded_rows(some(3), params, VOCAB))
    assert write(built, rows) == plain


@pytest.mark.parametrize("wrong", [{"model": "firm"}, {"rate": 0.0}, {"steps": 0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DecisionTraining(**wrong)
