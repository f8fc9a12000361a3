"""Heads in folders: what was saved comes back, and what cannot be used is named."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import save_file

from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads import store
from foretoken.heads.table import HEADS, HeadConfig, head_row, resolve

SIZES = {"hidden_size": 3, "vocab_size": 7}
SHAPES = {
    "acceptance": {"blocks": 2, "shared": True, "temperature": 1.5, "shift": 0.25},
    "decision": {"model": "hard"},
    "exits": {"layers": (0, 1, 4), "candidates": 2, "hidden": 4, "often": (1,)},
}


def head(seed=0, name="acceptance"):
    torch.manual_seed(seed)
    module = resolve(head_row(name).module)
    return module(module.Config(**SIZES, **SHAPES.get(name, {})))


def same(one, other):
    weights = one.state_dict(), other.state_dict()
    assert weights[0].keys() == weights[1].keys()
    return all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


@pytest.mark.parametrize("name", HEADS)
def test_every_head_comes_back_with_its_config_and_its_notes(name, tmp_path):
    saved = head(name=name)
    store.save(tmp_path / "a" / "b", name, saved, {"loss": 0.5})
    loaded, card = store.load(tmp_path / "a" / "b", name)
    assert type(loaded) is type(saved) and loaded.config == saved.config and same(loaded, saved)
    assert isinstance(loaded.config, HeadConfig)
    assert (card.kind, card.notes) == (name, {"loss": 0.5})
    assert not any(weight.requires_grad for weight in loaded.parameters()) and not loaded.training
    store.check_fits(card, tmp_path, 3, 7)


OLD = {  # as folders were written before there was one save for all heads
    "acceptance": (
        {"blocks": 1, "shared": False, "temperature": 1.5, "shift": 0.25},
        {"blocks.0.linear.weight": (3, 3), "blocks.0.linear.bias": (3,),
         "out.weight": (2, 3), "out.bias": (2,)},
    ),
    "decision": (
        {"model": "soft"},
        {"layers.0.weight": (2, 3), "layers.0.bias": (2,), "layers.2.weight": (1, 2),
         "layers.2.bias": (1,), "layers.4.weight": (1, 1), "layers.4.bias": (1,)},
    ),
    "exits": (
        {"layers": [2], "candidates": 2, "hidden": 4, "often": [2]},
        {"predictors.2.0.weight": (4, 6), "predictors.2.0.bias": (4,),
         "predictors.2.2.weight": (1, 4), "predictors.2.2.bias": (1,)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_folders_of_the_first_version_load(name, tmp_path):
    options, shapes = OLD[name]
    weights = {key: torch.randn(shape) for key, shape in shapes.items()}
    save_file(weights, tmp_path / "w")
    digest = hashlib.sha256((tmp_path / "w").read_bytes()).hexdigest()[:16]
    (tmp_path / "w").rename(tmp_path / f"head-{digest}.safetensors")
    text = {"kind": name, **SIZES, "options": options, "notes": {"steps": 3}, "version": 1}
    (tmp_path / "head.json").write_text(
        json.dumps({**text, "weights": f"head-{digest}.safetensors"}, indent=2)
    )
    loaded, card = store.load(tmp_path, name)
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in weights.items())
    assert (loaded.config.hidden_size, loaded.config.vocab_size) == (3, 7)
    assert card.options == options and card.notes == {"steps": 3}
    for key, value in options.items():
        assert getattr(loaded.config, key) == (tuple(value) if isinstance(value, list) else value)


def test_a_newer_head_replaces_the_older_one(tmp_path):
    store.save(tmp_path, "acceptance", head(0), {})
    store.save(tmp_path, "acceptance", head(1), {"again": True})
    assert len(list(tmp_path.iterdir())) == 2
    assert same(store.load(tmp_path, "acceptance")[0], head(1))


def test_a_writer_that_dies_before_the_card_leaves_the_older_head(tmp_path, monkeypatch):
    store.save(tmp_path, "acceptance", head(0), {})

    def dies(partial, final):
        if final.name == store.CARD:
            raise KeyboardInterrupt
        move(partial, final)

    move = store.move
    monkeypatch.setattr(store, "move", dies)
    with pytest.raises(KeyboardInterrupt):
        store.save(tmp_path, "acceptance", head(1), {"again": True})
    found, card = store.load(tmp_path, "acceptance")
    assert card.notes == {} and same(found, head(0))


def test_a_folder_without_a_head_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no head\.json") as caught:
        store.read_card(tmp_path / "none", "acceptance")
    assert "foretoken train acceptance" in caught.value.do


def test_a_broken_card_or_broken_weights_are_named(tmp_path):
    store.save(tmp_path, "acceptance", head(), {})
    path = tmp_path / store.CARD
    good = path.read_text()
    known = json.loads(good)
    options = known["options"]
    for text, why in (
        ("{", "cannot be read"),
        ("[]", "no object"),
        (json.dumps({"kind": "acceptance", "version": 1}), "lacks something"),
        (json.dumps(known | {"version": 99}), "version 99"),
        (json.dumps(known | {"kind": "exits"}), "of the kind 'exits'"),
        (json.dumps(known | {"options": options | {"width": 3}}), "unknown options"),
        (json.dumps(known | {"options": options | {"shared": False}}), "options differ"),
        (json.dumps(known | {"weights": "head-0.safetensors"}), "are missing"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=why):
            store.load(tmp_path, "acceptance")
    path.write_text(good)
    [weights] = tmp_path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="cut short"):
        store.load(tmp_path, "acceptance")


def test_another_width_or_vocabulary_is_refused(tmp_path):
    card = store.Card(kind="acceptance", **SIZES)
    with pytest.raises(ConfigError, match="hidden size is 5") as caught:
        store.check_fits(card, tmp_path, 5, 7)
    assert "hidden size is 3" in caught.value.possible and "train" in caught.value.do
    with pytest.raises(ConfigError, match="vocabulary is 8"):
        store.check_fits(card, tmp_path, 3, 8)


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        store.save(tmp_path / "file" / "head", "acceptance", head(), {})


def test_an_unknown_head_is_refused_with_the_nearest_one(tmp_path):
    with pytest.raises(ConfigError, match="did you mean exits"):
        store.load(tmp_path, "exit")


def test_a_head_in_the_home_directory_is_found_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    store.save(tmp_path / "head", "exits", head(name="exits"), {"loss": 0.5})
    assert store.card_of("~/head").notes == {"loss": 0.5}
    loaded, card = store.load("~/head", "exits")
    assert card.kind == "exits" and same(loaded, head(name="exits"))
    with pytest.raises(CheckpointError, match=r"there is no head\.json"):
        store.card_of("~nobody-here/head")


def test_a_folder_that_is_not_there_is_told(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="there is no such folder") as caught:
        store.card_of(tmp_path / "none")
    assert "hf download" not in caught.value.do
    with pytest.raises(CheckpointError, match="there is no such folder") as caught:
        store.card_of("owner/name")
    assert "`hf download owner/name --local-dir DIR`" in caught.value.do
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder") as caught:
        store.card_of("runs/none")
    assert "hf download" not in caught.value.do
    (tmp_path / "weights").touch()
    with pytest.raises(CheckpointError, match="that is a file"):
        store.card_of("weights")
    with pytest.raises(CheckpointError, match=r"no head\.json in that folder"):
        store.card_of(tmp_path)
