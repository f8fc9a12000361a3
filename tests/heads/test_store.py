"""Heads in folders: what was saved comes back, and what cannot be used is named."""

import json

import pytest
import torch
from torch import nn

from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads import store


def head(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def card(**changes):
    return store.Card(**{"kind": "acceptance", "hidden_size": 3, "vocab_size": 7} | changes)


def test_a_head_comes_back_with_its_card(tmp_path):
    saved = head()
    store.save(tmp_path / "a" / "b", saved, card(options={"blocks": 2}, notes={"loss": 0.5}))
    found = store.read_card(tmp_path / "a" / "b", "acceptance")
    assert found == card(options={"blocks": 2}, notes={"loss": 0.5})
    loaded = store.load_into(head(1), tmp_path / "a" / "b", "acceptance")
    assert torch.equal(loaded.weight, saved.weight)
    assert not any(weight.requires_grad for weight in loaded.parameters())
    store.check_fits(found, tmp_path, 3, 7)


def test_a_newer_head_replaces_the_older_one(tmp_path):
    store.save(tmp_path, head(0), card())
    store.save(tmp_path, head(1), card(notes={"again": True}))
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(
        store.load_into(head(2), tmp_path, "acceptance").weight, head(1).weight.detach()
    )


def test_a_writer_that_dies_before_the_card_leaves_the_older_head(tmp_path, monkeypatch):
    store.save(tmp_path, head(0), card())

    def dies(partial, final):
        if final.name == store.CARD:
            raise KeyboardInterrupt
        move(partial, final)

    move = store.move
    monkeypatch.setattr(store, "move", dies)
    with pytest.raises(KeyboardInterrupt):
        store.save(tmp_path, head(1), card(vocab_size=9))
    assert store.read_card(tmp_path, "acceptance").vocab_size == 7
    assert torch.equal(
        store.load_into(head(2), tmp_path, "acceptance").weight, head(0).weight.detach()
    )


def test_a_folder_without_a_head_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no head\.json") as caught:
        store.read_card(tmp_path / "none", "acceptance")
    assert "foretoken train acceptance" in caught.value.do


def test_a_broken_card_or_broken_weights_are_named(tmp_path):
    store.save(tmp_path, head(), card())
    path = tmp_path / store.CARD
    good = path.read_text()
    for text, why in (
        ("{", "cannot be read"),
        ("[]", "no object"),
        (json.dumps({"kind": "acceptance", "version": 1}), "lacks something"),
        (json.dumps(json.loads(good) | {"version": 99}), "version 99"),
        (json.dumps(json.loads(good) | {"kind": "exits"}), "of the kind 'exits'"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=why):
            store.read_card(tmp_path, "acceptance")
    path.write_text(good)
    [weights] = tmp_path.glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match="cut short"):
        store.read_weights(tmp_path, "acceptance")
    weights.unlink()
    with pytest.raises(CheckpointError, match="are missing"):
        store.read_weights(tmp_path, "acceptance")
    weights.write_bytes(whole)
    with pytest.raises(CheckpointError, match="options differ"):
        store.load_into(nn.Linear(4, 2), tmp_path, "acceptance")


def test_another_width_or_vocabulary_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="hidden size is 5") as caught:
        store.check_fits(card(), tmp_path, 5, 7)
    assert "hidden size is 3" in caught.value.possible and "train" in caught.value.do
    with pytest.raises(ConfigError, match="vocabulary is 8"):
        store.check_fits(card(), tmp_path, 3, 8)


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        store.save(tmp_path / "file" / "head", head(), card())
