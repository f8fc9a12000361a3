"""What one layer keeps of a row, read by others: the target's own keys, values and rotation."""

import pytest
import torch
import transformers
from transformers import DynamicCache

from foretoken.audit.rows import seeded_rows
from foretoken.errors import CapabilityError
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.layer_cache import own_keys_values, same_input
from foretoken.lm.table import TableLM
from foretoken.lm.views.view import TargetView
from foretoken.training.objectives.long_contexts import movable, rotated_on
from foretoken.trees.build import chain
from foretoken.types import Draft, Draw, Layer, SamplingParams

VOCAB = 61
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
ROTARY = {
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "a head of another size": ("Qwen3", {"head_dim": 32}),
    "frequencies by kind of layer": ("Gemma3Text", {"head_dim": 16, "sliding_window": 32}),
    "interleaved": ("Cohere", {}),
    "part of a head": ("Phi", {"partial_rotary_factor": 0.5}),
    "half as many cosines": ("GptOss", {"head_dim": 16, "num_local_experts": 4}),
}


def made(name, changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


@torch.inference_mode()
def last_keys_values(model, tokens):
    """Of the last layer, [T, heads, size], by the model's own cache."""
    cache = DynamicCache()
    model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    layer = cache.layers[-1]
    return layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)


def test_rows_are_those_of_the_models_own_cache_and_lie_where_they_are(make_llama):
    model = make_llama(VOCAB, seed=3)
    with open_lm(model, name="target") as target:
        memory = target.layer_cache(1)
        rows = seeded_rows([[3, 1, 4, 1, 5], [9, 2], [6]], SamplingParams(), VOCAB)
        target.prefill(rows[2:])
        assert memory.keys_values(rows[2])[0].shape == (2, 0, 16), "nothing but its last token"
        target.prefill(rows[:2])
        tree = chain(5, [9, 2, 6])
        target.score(rows[:1], [Draft(tree, Draw.POINT)])
        assert memory.keys_values(rows[0])[0].shape == (2, 4, 16), "the open tree is left out"
        target.commit(rows[:1], [[1, 2]])
        rows[0].extend([9, 2, 8])
        target.free(rows[2:])
        for one in rows[:2]:
            keys, values = memory.keys_values(one)
            for found, own in zip((keys, values), last_keys_values(model, one.tokens), strict=True):
                assert torch.allclose(found.transpose(0, 1), own[:-1], atol=1e-5)
            assert keys.untyped_storage().data_ptr() in {
                group.keys.untyped_storage().data_ptr() for group in target.cache.groups
            }
        assert TargetView(target).layer_cache(1) is memory


@pytest.mark.parametrize("family", ROTARY)
def test_rotations_are_the_models_own(family):
    model = made(*ROTARY[family])
    with open_lm(model, name="target") as target:
        memory = target.layer_cache(1)
        assert memory.rotary
        assert memory.size == getattr(model.config, "head_dim", None) or 16
        with torch.inference_mode():
            here, _ = own_keys_values(model, 1, 3)
            there, _ = own_keys_values(model, 1, 3 + 200)
            moved = rotated_on(memory, here, torch.full((len(here),), 200))
        assert torch.allclose(moved, there, atol=1e-3)
        assert not torch.allclose(here, there, atol=1e-2)
        assert movable(memory, 200, here.device)


def test_layers_below_do_not_blur_a_rotation():
    """In bfloat16 a text at other positions is rounded differently by every layer below."""
    model = made("SmolLM3", {"num_hidden_layers": 12, "no_rope_layers": [1] * 11 + [0]}).bfloat16()

    def values(layer):
        return [own_keys_values(model, layer, first)[1] for first in (0, 11)]

    with torch.inference_mode():
        assert not torch.equal(*values(10))
        with same_input(model, 10, 12):
            assert torch.equal(*values(10))
    assert not any(module._forward_pre_hooks for module in model.modules())
    with open_lm(model, name="target") as target:
        assert target.layer_cache(10).rotary and not target.layer_cache(11).rotary


def test_gradients_pass_a_rotation(make_llama):
    with open_lm(make_llama(VOCAB), name="target") as target:
        states = torch.randn(3, 4, 16, requires_grad=True)
        target.layer_cache(1).rotated(states, torch.tensor([0, 5, 9])).sum().backward()
    assert states.grad is not None and states.grad.abs().sum() > 0


def test_layers_without_rotation_leave_states_as_they_are():
    skipping = made("SmolLM3", {"no_rope_layers": [1, 0]})
    for model, sizes in ((skipping, (2, 16)), (gpt2(), (4, 8))):
        with open_lm(model, name="target") as target:
            memory = target.layer_cache(1)
            assert not memory.rotary and (memory.heads, memory.size) == sizes
            states = torch.randn(2, *sizes)
            assert torch.equal(memory.rotated(states, torch.tensor([4, 7])), states)
    with open_lm(skipping, name="target") as target:
        assert target.layer_cache(0).rotary


def test_a_rotation_that_changes_with_the_length_moves_no_keys():
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "rope_theta": 1e4}
    scaled = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors}
    changes = {"rope_parameters": scaled, "original_max_position_embeddings": 64}
    with open_lm(made("Phi3", changes), name="target") as target:
        memory = target.layer_cache(1)
        assert memory.rotary and movable(memory, 20, torch.device("cpu"))
        assert not movable(memory, 300, torch.device("cpu"))


def test_caches_that_cannot_be_read_are_refused():
    latent = {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 2,
    }  # fmt: skip
    own = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128}
    gptj = transformers.GPTJForCausalLM(
        transformers.GPTJConfig(vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, **own)
    )
    for model, why in ((made("DeepseekV3", latent), "different sizes"), (gptj.eval(), "told")):
        with open_lm(model, name="target") as lm, pytest.raises(CapabilityError, match=why):
            lm.layer_cache(1)


def test_a_tables_rows_are_its_hidden_states():
    table = TableLM.random(5, seed=1)
    [one] = seeded_rows([[1, 4, 0, 2]], SamplingParams(), 5)
    [states] = table.prefill([one], (Layer(2),))
    keys, values = table.layer_cache(2).keys_values(one)
    assert torch.equal(keys, states.transpose(0, 1)) and torch.equal(values, keys)
