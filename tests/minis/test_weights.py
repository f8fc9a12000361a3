"""The shipped minis load, belong together, fit the repository, and do what their cards say."""

import json
import subprocess
import sys

import pytest
import torch

from foretoken import minis
from foretoken.minis import evaluate, tasks, widen

cards = {name: json.loads((minis.path(name) / "card.json").read_text()) for name in minis.NAMES}


@pytest.fixture(scope="module")
def pair():
    target, tokenizer = evaluate.load(minis.path("text-target"))
    return target, evaluate.load(minis.path("text-draft"))[0], tokenizer


def test_weights_are_small_safetensors_only():
    folder = minis.path("text-target").parent
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".safetensors"]) >= 4
    assert sum(path.stat().st_size for path in files) <= 64 * 2**20
    assert not [path for path in files if path.suffix in {".bin", ".pt", ".pth", ".pkl"}]


def test_target_and_draft_share_one_vocabulary(pair):
    target, draft, tokenizer = pair
    vocabularies = [(minis.path(name) / "tokenizer.json").read_bytes() for name in minis.NAMES]
    assert vocabularies[0] == vocabularies[1]
    assert target.config.vocab_size == draft.config.vocab_size == len(tokenizer)
    assert target.config.eos_token_id == draft.config.eos_token_id == tokenizer.eos_token_id
    assert widen.count(draft.config, 1, 0) * 10 < widen.count(target.config, 1, 0)


def test_cards_tell_the_size_they_have(pair):
    for model, name in zip(pair[:2], minis.NAMES, strict=True):
        assert cards[name]["parameters"] == model.num_parameters()


def test_the_pair_measures_something():
    measured = cards["text-target"]["measured"]
    clear = [
        row
        for row in measured["families"].values()
        if row["target_accuracy"] >= 0.85 and row["draft_accuracy"] <= 0.6
    ]
    assert len(clear) >= 3
    assert 3.0 <= measured["mean"]["mean_accepted_length"] <= 4.8
    assert 0.3 <= measured["mean"]["entropy_per_token"] <= 1.2


def test_the_card_repeats_on_fresh_prompts(pair):
    """Twelve prompts of another seed: the accuracy is the card's within what chance allows."""
    target, _, tokenizer = pair
    family = "summarisation"
    examples = tasks.examples(family, "test", 12, seed=7)
    found = evaluate.accuracy(examples, evaluate.greedy(target, tokenizer, examples), tokenizer)
    stated = cards["text-target"]["measured"]["families"][family]["target_accuracy"]
    assert found >= stated - 0.35


def test_widening_the_target_keeps_its_logits(pair):
    wide, report = widen.widen(pair[0], params=60e6)
    assert report["width_factor"] == 2
    assert report["max_abs_logit_difference"] < 1e-4
    assert torch.isfinite(wide(torch.tensor([[0, 5]])).logits).all()


def test_looking_up_a_path_loads_no_model_library():
    code = (
        "import sys, foretoken.minis as m; m.path('text-target'); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
