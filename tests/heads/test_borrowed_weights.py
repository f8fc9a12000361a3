"""What a shipped head has in common with a shipped draft lies in the package once."""

import json

import pytest
import torch

from foretoken import shipped
from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads import borrowed, store

HEAD, LENDER = "smollm2-135m-eagle3", "smollm2-135m-draft"


@pytest.fixture(scope="module")
def head():
    return store.load(HEAD, "eagle3")[0].bfloat16()


def test_a_head_saved_beside_its_lender_comes_back_whole_and_smaller(head, tmp_path):
    store.save(tmp_path / "alone", "eagle3", head, {})
    store.save(tmp_path / "beside", "eagle3", head, {}, lender=LENDER)
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name).glob("head-*"))
        for name in ("alone", "beside")
    ]
    assert sizes[1] < sizes[0] / 3
    whole, thin = (store.load(tmp_path / name, "eagle3")[0] for name in ("alone", "beside"))
    weights = thin.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in whole.state_dict().items())


def test_what_differs_by_one_bit_is_written(head, tmp_path):
    weights = dict(head.state_dict())
    assert list(borrowed.common(weights, LENDER)) == ["embedding.weight"]
    weights["embedding.weight"] = weights["embedding.weight"].clone()
    weights["embedding.weight"][7, 7] += 1
    assert not borrowed.common(weights, LENDER)


def test_another_lender_than_it_was_made_with_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / LENDER
    folder.mkdir()
    file = shipped.path(LENDER) / borrowed.FILE
    monkeypatch.setattr(shipped, "_WEIGHTS", tmp_path)
    (folder / borrowed.FILE).write_bytes(file.read_bytes()[:-2] + b"\0\0")
    place = {"embedding.weight": ("smollm2-135m-draft", "model.embed_tokens.weight", "0" * 16)}
    with pytest.raises(CheckpointError, match="not the file that the head was made with"):
        borrowed.read(place)
    (folder / borrowed.FILE).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        borrowed.read(place)


def test_a_card_that_names_no_model_of_ours_is_refused(head, tmp_path):
    store.save(tmp_path, "eagle3", head, {}, lender=LENDER)
    card = json.loads((tmp_path / store.CARD).read_text())
    for places, error in (
        ({"embedding.weight": ["../../etc", "x", "y"]}, ConfigError),
        ({"embedding.weight": ["short"]}, CheckpointError),
        ({}, CheckpointError),
    ):
        (tmp_path / store.CARD).write_text(json.dumps({**card, "borrowed": places}))
        with pytest.raises(error):
            store.load(tmp_path, "eagle3")
