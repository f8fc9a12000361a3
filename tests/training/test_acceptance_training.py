"""Acceptance heads: labels that are true, a loss that is right, training that can be killed."""

import math
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from killed_acceptance import VOCAB, session, settings, some, train
from safetensors.torch import save_file

from foretoken.cli.train import prompts as given_prompts
from foretoken.engine.assemble import assemble
from foretoken.engine.session import Session
from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads import store
from foretoken.heads.acceptance import AcceptanceHead
from foretoken.lm.opening import open_lm
from foretoken.training.calibrate import Cape, cape, scaled, targets
from foretoken.training.capture import collect, shard
from foretoken.training.captures.guesses import Guesses
from foretoken.training.dataset.records import Chat
from foretoken.training.features import Features
from foretoken.training.heads import run_training
from foretoken.training.objectives.acceptance import (
    AcceptanceObjective,
    AcceptanceTraining,
    quality,
    weighted_loss,
)
from tests.lm.families import short


def captured(prompts, folder, **changes):
    """Every feature of one collection, in memory."""
    plan = {"new_tokens": 12, "temperature": 1.0, "seed": 0, **changes}
    found = collect(session(), prompts, Guesses(**plan), folder, "train", show=False)
    return found.take(torch.arange(len(found)))


def test_labels_are_the_true_chances_and_features_belong_to_the_guess(tmp_path):
    """Recomputed from the tables: guess y after x is taken with min(1, p(y | x) / q(y | x))."""
    pair = session()
    found = captured([[1, 2], [3]], tmp_path, new_tokens=8, seed=1)
    assert len(found["accept"]) == 16 and found["hidden"].shape == (16, VOCAB)
    possible = {}
    for a in range(VOCAB):
        for b in range(VOCAB):
            p, q = (lm.after([a, b]).softmax(-1) for lm in (pair.target, pair.draft))
            for y in range(VOCAB):
                key = (y, round(float(pair.draft.after([a, b])[0]), 4))
                possible[key] = (min(1.0, float(p[y] / q[y])), float(p.argmax() == y))
    for i in range(16):
        key = (int(found["input_ids"][i]), round(float(found["before"][i, 0]), 4))
        assert float(found["accept"][i]) == pytest.approx(possible[key][0], abs=1e-5)
        assert float(found["best"][i]) == possible[key][1]


def test_features_are_those_of_the_text_that_was_read(tmp_path):
    """With no mixing the draft reads its own guesses, each after the guess before it."""
    pair = session()
    found = captured([[1, 2]], tmp_path, new_tokens=6)
    text = [2, *found["input_ids"].tolist()]
    for i, hidden in enumerate(found["hidden"]):
        assert torch.allclose(hidden.double(), pair.draft.after(text[i : i + 2]), atol=1e-5)


def test_a_text_may_fill_the_models_positions():
    """A guess at its last place, the one that is never fed, would be read without a position."""
    texts = [Chat("open", 1.0, list(range(n)), list(range(12, 74 - n))) for n in (6, 61)]
    with (
        open_lm(short("gpt2", 61), kernels="dense") as target,
        open_lm(short("gpt2", 61), name="draft", kernels="dense") as draft,
    ):
        pair = Session(assemble("chain", target, draft, depth=3), method="chain", draft=draft)
        found = shard(pair, texts, Guesses(new_tokens=56, temperature=1.0, seed=0), 0)
    assert len(found["accept"]) == 55 and found["hidden"].shape == (55, 64)
    assert found["input_ids"].dtype == torch.long


def test_mixing_leaves_out_what_the_target_wrote(tmp_path):
    found = captured(some(10), tmp_path, new_tokens=40, mix=0.5, seed=2)
    assert 0.4 < len(found["accept"]) / 400 < 0.6


def test_outcomes_come_as_often_as_the_chances_say(tmp_path):
    found = captured(some(30), tmp_path, new_tokens=60, mix=0.15, seed=5)
    gap = float(found["outcome"].mean() - found["accept"].mean())
    assert abs(gap) < 4 * 0.5 / math.sqrt(len(found["accept"]))
    assert set(found["outcome"].tolist()) == {0.0, 1.0}


def test_at_temperature_zero_a_guess_is_right_or_wrong(tmp_path):
    found = captured(some(6), tmp_path, new_tokens=20, temperature=0.0, mix=0.15)
    assert torch.equal(found["accept"], found["best"])
    assert set(found["accept"].tolist()) == {0.0, 1.0}


def test_the_loss_at_weight_one_is_soft_binary_cross_entropy():
    logits, accept = torch.randn(50, 2), torch.rand(50)
    margin = logits[:, 1] - logits[:, 0]
    right = torch.nn.functional.binary_cross_entropy_with_logits(margin, accept)
    assert float(weighted_loss(logits, accept, 1.0)) == pytest.approx(float(right), rel=1e-5)


def test_the_loss_is_least_where_odds_are_moved_by_the_weight():
    accept = torch.tensor([0.8])
    at = {
        p: float(weighted_loss(torch.tensor([[0.0, math.log(p / (1 - p))]]), accept, 6.0))
        for p in [i / 200 for i in range(1, 200)]
    }
    assert min(at, key=at.get) == pytest.approx(0.8 / (0.8 + 6 * 0.2), abs=0.006)


@pytest.mark.parametrize("where", ["collecting", "training"])
def test_a_killed_run_ends_with_the_same_head(where, tmp_path):
    whole = train(tmp_path / "straight")
    script = Path(__file__).parent / "killed_acceptance.py"
    command = [sys.executable, str(script), str(tmp_path / "killed"), where]
    killed = subprocess.run(command, capture_output=True, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    shards = list((tmp_path / "killed" / "training" / "capture").glob("*.safetensors"))
    assert len(shards) == (2 if where == "collecting" else 4)
    resumed = train(tmp_path / "killed")
    assert resumed["held_out"] == whole["held_out"]
    one, _ = store.load(tmp_path / "straight", "acceptance")
    other, _ = store.load(tmp_path / "killed", "acceptance")
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name


@pytest.mark.parametrize(("bad", "why"), [([1] * 9, "has 9 tokens"), ([], "is empty")])
def test_a_bad_prompt_is_refused_before_any_is_captured(bad, why, tmp_path):
    pair = session()
    pair.target.max_length = 8

    def prompts(split, count):
        return [*some(17), bad, *some(2)] if split == "train" else some(count)

    config = settings(prompts=20, new_tokens=2)
    with pytest.raises(ConfigError, match=f"prompt 17 of the split 'train' {why}"):
        run_training(pair, "acceptance", prompts, config, tmp_path, show=False)
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("*.json"))


def test_training_beats_the_base_rate_and_tells_taken_from_rejected(tmp_path):
    found = train(tmp_path, steps=400, rate=2e-2)
    after = found["figures"]["none"]
    assert after["divergence"] < found["untrained"]["divergence"]
    assert after["brier"] < after["base"]
    assert after["mean_if_accepted"] > after["mean_if_rejected"] + 0.1
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    _, card = store.load(tmp_path, "acceptance")
    assert (card.hidden_size, card.vocab_size) == (VOCAB, VOCAB)
    assert card.notes["figures"]["none"] == after


def test_a_weight_lowers_predictions_and_a_shift_undoes_it(tmp_path):
    plain = train(tmp_path / "1", steps=400, rate=2e-2)["figures"]
    heavy = train(tmp_path / "6", steps=400, rate=2e-2, weight=6.0, calibration="shift")
    figures = heavy["figures"]
    assert figures["none"]["mean_if_accepted"] < plain["none"]["mean_if_accepted"]
    assert figures["shift"]["brier"] < 0.7 * figures["none"]["brier"]
    head, _ = store.load(tmp_path / "6", "acceptance")
    assert head.config.shift > 1.0  # about log 6


def test_a_collection_of_another_run_is_refused(tmp_path):
    train(tmp_path)
    with pytest.raises(CheckpointError, match="other options") as caught:
        train(tmp_path, seed=4)
    assert "--fresh" in caught.value.do


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0.0},
        {"calibration": "hope"},
        {"steps": 0},
        {"steps": 2.5},
        {"blocks": -1},
        {"mix": 1.0},
        {"shared": 1},
        {"temperature": -1},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        settings(**wrong)


def test_scaling_finds_the_temperature_and_the_shift():
    torch.manual_seed(0)
    truth = 2.0 * torch.randn(20000, dtype=torch.float64)
    labels = truth.sigmoid()
    assert scaled(3.0 * truth, labels, shift=False) == pytest.approx((3.0, 0.0), abs=1e-3)
    assert scaled(3.0 * (truth - 1.5), labels, shift=True) == pytest.approx((3.0, 1.5), abs=1e-3)


def features(n, seed, folder):
    """Tokens whose true chance is a function of two of eight features, and one outcome each."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, 8, generator=generator)
    accept = (1.2 * hidden[:, 0] + hidden[:, 1]).sigmoid() * 0.6 + 0.3
    outcome = (torch.rand(n, generator=generator) < accept).float()
    found = {"hidden": hidden, "accept": accept, "outcome": outcome, "input_ids": torch.arange(n)}
    save_file(found, folder / f"{seed}.safetensors")
    return Features([folder / f"{seed}.safetensors"])


def overtrained(data, labels, steps):
    torch.manual_seed(1)
    head = AcceptanceHead(AcceptanceHead.Config(hidden_size=8, vocab_size=2, blocks=2))
    for block in head.blocks:
        torch.nn.init.normal_(block.linear.weight, std=0.35)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    objective = AcceptanceObjective(AcceptanceTraining(weight=1.0, labels=labels), data)
    batch = data.take(torch.arange(len(data)))
    for _ in range(steps):
        loss, _ = objective(head, batch, random.Random(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head


def error(head, data):
    predicted = data.each(lambda tokens: head.accepted(tokens["hidden"]))
    return quality(predicted, data.column("accept"))["brier"]


@pytest.mark.parametrize("kind", ["bin", "kde"])
def test_with_outcomes_only_cape_mends_and_true_chances_win(kind, tmp_path):
    train_data, dev, test = (features(n, seed, tmp_path) for seed, n in enumerate((600, 300, 4000)))
    early = overtrained(train_data, "outcome", 30)
    late = overtrained(train_data, "outcome", 300)
    mended = cape(early, train_data, dev, 300, Cape(kind=kind, rate=1e-3, epochs=18, batch=64))
    informed = overtrained(train_data, "accept", 300)
    assert error(late, test) > error(early, test), "trained past its best, it remembers outcomes"
    assert error(mended, test) <= error(early, test) + 1e-4
    assert error(informed, test) < error(mended, test)


def test_calibrated_targets_are_outcomes_of_like_predictions():
    predicted = torch.linspace(0.01, 0.99, 1000)
    outcomes = (predicted > 0.5).float()
    binned = targets(predicted, outcomes, Cape(kind="bin", bins=4))
    assert binned.unique().tolist() == [0.0, 1.0]
    smooth = targets(predicted, outcomes, Cape(kind="kde"))
    assert float(smooth[0]) < 0.01 and float(smooth[-1]) > 0.99
    assert float(smooth[500]) == pytest.approx(0.5, abs=0.05)


def test_prompts_beyond_the_option_are_told_of(tmp_path, caplog):
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(f"question {n}" for n in range(20)))
    for split, count, told in (
        ("train", 12, "12 of 18 prompts in {} are taken; --set prompts=18: all"),
        ("all", 5, "5 of 20 prompts in {} are taken; --set chats=20: all"),
    ):
        assert len(given_prompts(path, split, count)) == count
        assert told.format(path) in caplog.text
    caplog.clear()
    assert len(given_prompts(path, "train", 18) + given_prompts(path, "valid", 1)) == 19
    assert not caplog.text
