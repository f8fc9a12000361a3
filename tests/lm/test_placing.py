"""A target placed by a map of devices: what runs without a GPU, and what is refused."""

import pytest
import torch

from foretoken.engine.loading import load
from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.placing import beside, check_map, check_placed, is_split

SPLIT = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
PROMPTS = [[1, 2, 3, 4], [9, 8, 7, 6, 5, 4, 3], [5, 5, 5]]


def texts(session):
    results = session.generate(PROMPTS, max_new_tokens=12, ignore_eos=True)
    return [result.tokens for result in results]


@pytest.mark.parametrize("device_map", [{"": "cpu"}, SPLIT], ids=["whole", "by module"])
def test_a_mapped_target_writes_the_same(device_map, pair_folders):
    target, draft = pair_folders
    options = {"controller": "fixed", "depth": 3, "nodes": 6, "kernels": "dense"}
    with load(target, "tree", draft, **options) as session:
        wanted = texts(session)
    with load(target, "tree", draft, device_map=device_map, **options) as session:
        assert texts(session) == wanted
        layers = zip(session.target.model.model.layers, session.target.cache.rows_of, strict=True)
        for module, kept in layers:
            assert kept.keys.device == next(module.parameters()).device


@pytest.mark.parametrize("place", ["disk", "meta"])
def test_a_module_out_of_memory_is_refused_by_name(place, pair_folders):
    with pytest.raises(CapabilityError, match=r"model\.layers\.1 .*" + place):
        load(pair_folders[0], "plain", device_map={**SPLIT, "model.layers.1": place})


def test_a_loaded_model_with_a_part_out_of_memory_is_refused(make_llama):
    model = make_llama(40)
    model.model.layers[1].to("meta")
    with pytest.raises(CapabilityError, match=r"model\.layers\.1"):
        check_placed(model)


@pytest.mark.parametrize("given", ["everywhere", 3, {}, {"": "nowhere"}])
def test_what_is_no_map_is_refused(given):
    with pytest.raises(ConfigError):
        check_map(given)


def test_a_map_and_a_device_are_two_answers(pair_folders):
    with pytest.raises(ConfigError, match="device_map"):
        load(pair_folders[0], "plain", device="cpu", device_map={"": "cpu"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the map could be had")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="cuda"):
        check_map({"model": "cpu", "lm_head": 0})


def test_parts_on_several_devices_are_told_from_one(make_llama):
    model = make_llama(40)
    assert not is_split(model)
    model.hf_device_map = {"model": 0, "lm_head": 1}
    assert is_split(model)
    model.hf_device_map = {"model": "cpu", "lm_head": "cpu"}
    assert not is_split(model)


def test_a_draft_is_put_beside_the_last_layer(make_llama):
    model = make_llama(40)
    assert beside(model, {"device_map": {"": "cpu"}, "dtype": "float32"}, "draft") == {
        "dtype": "float32", "device": torch.device("cpu"),
    }  # fmt: skip
    assert beside(model, {"device_map": None, "device": "cpu"}, "x") == {"device": "cpu"}


def test_a_loaded_draft_stays_where_its_owner_put_it(tiny_pair, monkeypatch):
    """Nobody named a device: the one of the target is for drafts that are read."""
    monkeypatch.setattr("foretoken.lm.placing.last_device", lambda model: torch.device("cuda:0"))
    target, draft = tiny_pair
    with load(target, "chain", draft, kernels="dense", depth=5) as session:
        assert session.draft.model is draft
        assert len(session.generate([1, 2, 3], 4, ignore_eos=True).tokens) == 4


def test_a_draft_goes_where_its_target_is_unless_somebody_says_where(make_llama, monkeypatch):
    """On a machine with a GPU, too, where a model left on the CPU has its draft there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = make_llama(61)
    assert (
        beside(model, {}, "draft")
        == beside(model, {"device": None}, "draft")
        == {"device": torch.device("cpu")}
    )
    assert beside(model, {"device": "cuda"}, "draft") == {"device": "cuda"}


def test_what_is_said_of_a_target_is_not_asked_of_a_loaded_draft(tiny_pair):
    target, draft = tiny_pair
    told = {"device": "cuda:0", "dtype": "bfloat16", "device_map": "auto", "token": "x"}
    assert beside(target, told, draft) == {"token": "x"}
