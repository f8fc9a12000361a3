"""Heads know their model: told when they are trained, compared when they are opened."""

import copy
import logging

import pytest
import torch

from foretoken.heads import made_for, store
from foretoken.heads.medusa import Medusa
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.lm.views.view import TargetView
from foretoken.training.averaging import average

VOCAB, WIDTH = 61, 64


@pytest.fixture
def model(make_llama):
    return make_llama(VOCAB, seed=3)


def saved(folder, notes):
    torch.manual_seed(len(folder.name))
    head = Medusa(Medusa.Config(hidden_size=WIDTH, vocab_size=VOCAB))
    return store.save(folder, "medusa", head, notes)


def test_a_model_is_known_in_any_type_and_below_any_view(model, make_llama):
    lm = open_lm(model, kernels="dense")
    known = made_for.identity(lm)
    assert known and made_for.identity(TargetView(lm)) == known
    small = copy.deepcopy(model).to(torch.bfloat16)
    rounded = copy.deepcopy(small).to(torch.float32)  # as a checkpoint in bfloat16 is read
    for other in (small, rounded):
        assert made_for.identity(open_lm(other, kernels="dense")) == known
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        tuned.model.embed_tokens.weight *= 1.01
    for other in (tuned, make_llama(VOCAB, seed=4)):
        assert made_for.identity(open_lm(other, kernels="dense")) != known
    lm.close()


def test_notes_name_a_folder_without_the_way_to_it(model, tmp_path):
    model.save_pretrained(tmp_path / "mine")
    lm = open_lm(model, kernels="dense")
    assert set(made_for.notes_of(lm)) == {"identity"}, "a model of no name"
    for given, told in ((str(tmp_path / "mine"), "mine"), ("some/model", "some/model")):
        model.config._name_or_path = given
        assert made_for.notes_of(lm)["of"] == told
    lm.close()
    assert set(made_for.notes_of(TableLM.random(VOCAB, seed=1))) == {"identity"}


def test_another_model_is_told_once(model, make_llama, tmp_path, caplog):
    lm, other = open_lm(model, kernels="dense"), open_lm(make_llama(VOCAB, seed=4))
    where = saved(tmp_path / "head", {**made_for.notes_of(lm), "of": "some/model"})
    silent = saved(tmp_path / "old", {"steps": 3})
    with caplog.at_level(logging.WARNING, "foretoken"):
        assert not made_for.warn_of_another(store.card_of(where), where, lm)
        assert not made_for.warn_of_another(store.card_of(silent), silent, other)
        assert not caplog.records
        assert made_for.warn_of_another(store.card_of(where), where, other)
        assert made_for.warn_of_another(store.card_of(where), where, other)
    [record] = caplog.records
    assert "another model, some/model" in record.getMessage() and str(where) in record.getMessage()
    lm.close()
    other.close()


def test_a_mean_is_for_the_model_of_all_its_heads(tmp_path):
    alike = [saved(tmp_path / name, {"of": "a", "identity": "1"}) for name in ("a", "bb")]
    other = saved(tmp_path / "ccc", {"of": "a", "identity": "2"})
    average(alike, [1, 1], tmp_path / "mean")
    notes = store.card_of(tmp_path / "mean").notes
    assert (notes["of"], notes["identity"]) == ("a", "1")
    average([*alike, other], [1, 1, 1], tmp_path / "mixed")
    notes = store.card_of(tmp_path / "mixed").notes
    assert notes["of"] == "a" and "identity" not in notes
