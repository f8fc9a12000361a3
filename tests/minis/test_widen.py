"""Widening keeps the function and changes the size."""

import json
import resource
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from foretoken.errors import CapabilityError, CheckpointError, ConfigError
from foretoken.minis import widen


def small(tied=True, kv_heads=2, bias=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():  # far from the initial state, where everything is nearly zero
        weight.data += 0.2 * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_logits_stay_and_parameters_multiply(tied, kv_heads, bias):
    model = small(tied, kv_heads, bias)
    before = sum(p.numel() for p in model.parameters())
    assert before == widen.count(model.config, 1, 0)
    wide, report = widen.widen(model, params=before * 10)
    after = sum(p.numel() for p in wide.parameters())
    assert after == report["parameters_after"]
    assert 0.8 * before * 10 < after < 1.2 * before * 10
    tokens = torch.randint(0, 97, (2, 40))
    with torch.inference_mode():
        difference = (model(tokens).logits - wide(tokens).logits).abs().max()
    assert difference < 1e-4
    assert report["max_abs_logit_difference"] < 1e-4


def test_added_layers_change_nothing_but_cost():
    model = small()
    wide, report = widen.widen(model, params=widen.count(model.config, 2, 3))
    assert (report["width_factor"], report["layers_added"]) == (2, 3)
    assert wide.config.num_hidden_layers == 6
    assert report["max_abs_logit_difference"] < 1e-4


def test_duplicates_differ_in_their_weights():
    wide, _ = widen.widen(small(), params=widen.count(small().config, 3, 0))
    weight = wide.model.layers[0].mlp.up_proj.weight
    assert not torch.allclose(weight[:64], weight[64:128], atol=1e-4)
    assert not torch.allclose(weight[:, :32], weight[:, 32:64], atol=1e-4)


def test_a_folder_is_written_whole_and_says_what_it_is(tmp_path, monkeypatch):
    model = small()
    model.save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.setattr(widen, "_SHARD_BYTES", 100_000)  # several shards
    params = widen.count(model.config, 4, 0)
    report = widen.widen_directory(tmp_path / "small", tmp_path / "wide", params)
    assert len(list((tmp_path / "wide").glob("*.safetensors"))) > 1
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert wide.dtype == torch.float32
    assert sum(p.numel() for p in wide.parameters()) == params == report["parameters_after"]
    assert widen.logit_difference(model, wide.eval()) < 1e-4
    assert (tmp_path / "wide" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "wide" / "widening.json").read_text()) == report
    assert "behaves as the small one" in (tmp_path / "wide" / "README.md").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small", "wide"]


def test_bf16_states_its_own_difference(tmp_path):
    model = small()
    model.save_pretrained(tmp_path / "small")
    params = widen.count(model.config, 2, 0)
    report = widen.widen_directory(tmp_path / "small", tmp_path / "wide", params, dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "wide").dtype == torch.bfloat16
    assert report["dtype"] == "bfloat16"
    assert report["max_abs_logit_difference"] > 1e-4  # rounding is not hidden


def test_bad_requests_are_refused_and_leave_nothing(tmp_path):
    model = small()
    model.save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match="and more"):
        widen.widen_directory(tmp_path / "small", tmp_path / "wide", params=10)
    with pytest.raises(ConfigError, match="float32, bfloat16"):
        widen.widen_directory(tmp_path / "small", tmp_path / "wide", 1e6, dtype="int3")
    with pytest.raises(CheckpointError, match="safetensors"):
        widen.widen_directory(tmp_path / "nothing", tmp_path / "wide", 1e6)
    with pytest.raises(ConfigError, match="not empty"):
        widen.widen_directory(tmp_path / "small", tmp_path / "small", 1e6)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        widen.widen_directory(tmp_path / "small", tmp_path / "file" / "wide", 1e6)
    with pytest.raises(CapabilityError, match="gpt2"):
        widen.plan(GPT2Config(), 1e9)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "small"]


def test_a_full_disk_leaves_nothing(tmp_path):
    """A limit on file size stands for the disk."""
    model = small()
    model.save_pretrained(tmp_path / "small")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ConfigError, match="cannot be written"):
            widen.widen_directory(tmp_path / "small", tmp_path / "wide", 1e6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in tmp_path.iterdir()] == ["small"]


def test_the_given_model_is_left_as_it_was():
    model = small().to(torch.bfloat16)
    widen.widen(model, params=widen.count(model.config, 2, 0))
    assert model.dtype == torch.bfloat16
