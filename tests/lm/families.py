"""Random tiny models of many families, with weights so large that a wrong mask moves the logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers as hf

WINDOW = 8  # smaller than every test's text
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
MIXED = ["sliding_attention", "full_attention"] * 2
MOE = {"num_experts_per_tok": 2}

LLAMA = hf.LlamaConfig, {}
# family -> configuration class and what differs from COMMON
REQUIRED: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": LLAMA,
    "qwen2": (hf.Qwen2Config, {}),
    "qwen3": (hf.Qwen3Config, {"head_dim": 16}),
    "mistral": (hf.MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (
        hf.Gemma2Config,
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED,
         "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        hf.Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED,
         "query_pre_attn_scalar": 16},
    ),
    "gpt2": (
        hf.GPT2Config,
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 4096, "n_inner": 96},
    ),
    "gpt_neox": (hf.GPTNeoXConfig, {}),
    "phi3": (hf.Phi3Config, {"sliding_window": WINDOW}),
    "opt": (hf.OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "starcoder2": (hf.Starcoder2Config, {"sliding_window": WINDOW}),
    "granite": (hf.GraniteConfig, {"attention_multiplier": 0.25}),
    "mixtral": (hf.MixtralConfig, {"num_local_experts": 4, **MOE}),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16, **MOE},
    ),
}  # fmt: skip
FURTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama_one_kv": (hf.LlamaConfig, {"num_key_value_heads": 1}),
    "llama_no_groups": (hf.LlamaConfig, {"num_key_value_heads": 4}),
    "qwen2_mixed": (
        hf.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
    "gpt_oss": (
        hf.GptOssConfig,
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED,
         "num_local_experts": 4, **MOE},
    ),
    "cohere2": (hf.Cohere2Config, {"sliding_window": WINDOW, "layer_types": MIXED}),
    "olmo2": (hf.Olmo2Config, {}),
    "falcon": (
        hf.FalconConfig,
        {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "deepseek_v3": (
        hf.DeepseekV3Config,
        {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 16, "v_head_dim": 20, "n_routed_experts": 4, "n_group": 1,
         "topk_group": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1, **MOE},
    ),
    "gptj": (
        hf.GPTJConfig,
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 4096, "rotary_dim": 8},
    ),
}  # fmt: skip
# Layers that hand nothing but the mask on to their attention, or whose attention asks for no name;
# so do gptj and falcon without groups of keys.
UNTOLD: dict[str, tuple[Any, dict[str, Any]]] = {
    "codegen": (
        hf.CodeGenConfig,
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 4096, "rotary_dim": 8},
    ),
    "nemotron": (hf.NemotronConfig, {}),
    "stablelm": (hf.StableLmConfig, {}),
}  # fmt: skip
CHAINS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bloom": (hf.BloomConfig, {"n_layer": 4, "n_head": 4}),
    "falcon_alibi": (hf.FalconConfig, {"alibi": True, "new_decoder_architecture": False}),
    "mpt": (hf.MptConfig, {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 4096}),
    "gpt_neo": (
        hf.GPTNeoConfig,
        {"num_layers": 4, "num_heads": 4, "window_size": WINDOW,
         "attention_types": [[["global", "local"], 2]]},
    ),
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 40,
}
SCALED: dict[str, tuple[Any, dict[str, Any]]] = {
    "phi3_longrope": (
        hf.Phi3Config,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40,
         "max_position_embeddings": 400},
    ),
}  # fmt: skip
OTHERS = {
    "mamba2": (
        hf.Mamba2Config,
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2},
    ),
    "falcon_h1": (hf.FalconH1Config, {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}),
}
ALIKE = ("mistral", "qwen2", "granite", "starcoder2", "phi3")  # to llama, qwen3 and gpt_neox
FAMILIES = {**REQUIRED, **FURTHER, **UNTOLD, **CHAINS, **SCALED, **OTHERS}


def slowly(families: Iterable[str]) -> list[Any]:
    """Parameters of tests that only the slow suite runs."""
    return [pytest.param(family, marks=pytest.mark.slow) for family in families]


def few(families: Iterable[str]) -> list[Any]:
    """All these as parameters; those that differ from others in nothing which a view of a model
    touches are left to the slow suite."""
    found = list(families)
    alike = [family for family in found if family in ALIKE]
    return [*(family for family in found if family not in ALIKE), *slowly(alike)]


def short(family: str, positions: int) -> Any:
    """One that knows no more positions than these."""
    names = ("max_position_embeddings", "n_positions")
    return tiny(family, **dict.fromkeys(names, positions))


def tiny(family: str, seed: int = 0, **further: Any) -> Any:
    """A random model of `family` in eval mode; the same for the same seed."""
    kind, changes = FAMILIES[family]
    if further:
        known = {**COMMON, **changes}
        further = {name: value for name, value in further.items() if name in known}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = hf.AutoModelForCausalLM.from_config(kind(**{**COMMON, **changes, **further}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                scale = 0.8 if "embed" in name else 0.25
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
            else:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def tied() -> Any:
    """A small model that scores tokens by its embeddings."""
    model = tiny("llama")
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def sharing_keys(layers: int = 4) -> Any:
    """A Gemma 4 whose last two layers read the keys and values of the one before them."""
    config = hf.Gemma4TextConfig(
        **COMMON | {"num_hidden_layers": layers}, head_dim=16, global_head_dim=16,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=97,
        layer_types=["full_attention"] * layers, num_kv_shared_layers=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval()
