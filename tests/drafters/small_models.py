"""Tiny models of the families that self-speculation must work on."""

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

LAYERS = 4
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "gemma2": (Gemma2Config, {"head_dim": 16, **MIXED}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 16, **MIXED}),
}


def small(family: str, seed: int = 0, layers: int = LAYERS):
    kind, changes = FAMILIES[family]
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        kind(**{**SHAPE, "num_hidden_layers": layers, **changes})
    ).eval()


def flat_above(model, depth: int):
    """The same model, whose layers from `depth` on add nothing."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in model.base_model.layers[depth:]:
            for name, weight in layer.named_parameters():
                if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                    weight.zero_()
    return model
