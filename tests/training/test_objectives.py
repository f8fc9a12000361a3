"""Losses against their definitions."""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.training.attention import hurry, short_rows
from foretoken.training.objectives.distill import Distill, forward_divergence
from foretoken.training.objectives.language_model import (
    LanguageModel,
    LayerSkip,
    weighted_cross_entropy,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return {"input_ids": torch.randint(0, 23, (2, 10)), "weights": torch.rand(2, 10)}


def test_cross_entropy_is_the_weighted_mean():
    logits, targets = torch.randn(5, 7), torch.randint(0, 7, (5,))
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0])
    losses = -logits.softmax(-1)[range(5), targets].log()
    expected = (losses[0] + 2 * losses[2] + 0.5 * losses[3]) / 3.5
    assert weighted_cross_entropy(logits, targets, weights) == pytest.approx(float(expected))


def test_divergence_is_zero_only_for_equal_laws():
    p, q, weights = torch.randn(4, 6), torch.randn(4, 6), torch.ones(4)
    assert forward_divergence(p, p + 3.0, weights) == pytest.approx(0.0, abs=1e-6)
    law_p, law_q = p.softmax(-1), q.softmax(-1)
    expected = float((law_p * (law_p / law_q).log()).sum(-1).mean())
    assert forward_divergence(p, q, weights) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_layer_skip_without_dropout_adds_only_the_exit_loss(model, batch):
    plain = float(LanguageModel()(model, batch, random.Random(0))[0])
    skip = LayerSkip(dropout=0.0, exit_weight=0.5, exit_part=1, exits=(4,))
    loss, metrics = skip(model, batch, random.Random(0))
    assert float(metrics["loss"]) == pytest.approx(plain, rel=1e-5)
    assert float(metrics["exit_loss"]) == pytest.approx(plain, rel=1e-5)  # exit after the last
    assert float(loss) == pytest.approx(1.5 * plain, rel=1e-5)
    early = LayerSkip(dropout=0.0, exit_part=1, exits=(2,))(model, batch, random.Random(0))[1]
    assert float(early["exit_loss"]) != pytest.approx(plain, rel=1e-5)


def test_deeper_layers_are_dropped_more_often_and_the_first_never(model, batch):
    calls = [0] * 4
    hooks = [
        layer.register_forward_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        for seed in range(300):
            LayerSkip(dropout=0.5, exits=(2,))(model, batch, random.Random(seed))
    for hook in hooks:
        hook.remove()
    assert calls[0] == 300
    assert calls[0] > calls[1] > calls[2] > calls[3]
    assert calls[3] == pytest.approx(150, abs=35)


@torch.no_grad()
def test_a_student_equal_to_its_teacher_pays_only_for_the_data(model, batch):
    plain = float(LanguageModel()(model, batch, random.Random(0))[0])
    loss, metrics = Distill(teacher=model, share=0.75)(model, batch, random.Random(0))
    assert metrics["divergence"] == pytest.approx(0.0, abs=1e-6)
    assert float(loss) == pytest.approx(0.25 * plain, rel=1e-5)


def test_written_out_attention_is_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 12, 8) for _ in range(3))
    out, _ = short_rows(torch.nn.Module(), q, k, v, None, scaling=8**-0.5)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(out.float(), right.transpose(1, 2), atol=0.05)


def test_a_torch_that_knows_the_older_name_of_a_limit_alone_is_no_obstacle(monkeypatch):
    class Older:
        __slots__ = ("cache_size_limit",)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._dynamo, "config", Older())
    hurry()
    assert torch._dynamo.config.cache_size_limit == 64
