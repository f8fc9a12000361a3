"""Decoder layers of a head as an ordinary Llama of transformers, which runs in our KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foretoken.heads.decoder_layer import DecoderLayer


def llama_of(
    layers: Sequence[Any] | nn.ModuleList,
    norm: nn.RMSNorm | None,
    outputs: Float[Tensor, "n W"] | None,
    positions: int,
) -> Any:
    """A LlamaForCausalLM with copies of these weights; no norm where the head has none.

    Without outputs of its own it has a single one, of zeros: others read its states.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    first = layers[0]
    assert isinstance(first, DecoderLayer)
    width = first.joined.out_features
    rows = first.joined.weight.new_zeros(1, width) if outputs is None else outputs
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(rows), hidden_size=width, intermediate_size=first.gate.out_features,
            num_hidden_layers=len(layers), num_attention_heads=first.heads,
            num_key_value_heads=first.shared, head_dim=first.size, rms_norm_eps=first.eps,
            rope_parameters={"rope_type": "default", "rope_theta": first.base},
            attention_bias=first.attention.bias is not None,
            max_position_embeddings=positions, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    weights = {"lm_head.weight": rows}
    for i, layer in enumerate(layers):
        weights |= {f"model.layers.{i}.{name}": part for name, part in as_llama(layer).items()}
        if not isinstance(layer.before, nn.RMSNorm):
            model.model.layers[i].input_layernorm = nn.Identity()
    if norm is None:
        model.model.norm = nn.Identity()
    else:
        weights["model.norm.weight"] = norm.weight
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert missing == ["model.embed_tokens.weight"] and not unknown, (missing, unknown)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()  # never asked for: embeddings are supplied
    ready: Any = model
    return ready.eval().requires_grad_(False)


def as_llama(layer: Any) -> dict[str, Tensor]:
    """Views of the weights of a decoder layer, by their names in transformers' Llama."""
    query, key, value = layer.attention.weight.split(layer.sizes)
    found = {
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": layer.joined.weight,
        "post_attention_layernorm.weight": layer.between.weight,
        "mlp.gate_proj.weight": layer.gate.weight,
        "mlp.up_proj.weight": layer.up.weight,
        "mlp.down_proj.weight": layer.down.weight,
    }
    if layer.attention.bias is not None:
        parts = layer.attention.bias.split(layer.sizes)
        for name, part in zip("qkv", parts, strict=True):
            found[f"self_attn.{name}_proj.bias"] = part
        found["self_attn.o_proj.bias"] = torch.zeros_like(layer.between.weight)
    if isinstance(layer.before, nn.RMSNorm):
        found["input_layernorm.weight"] = layer.before.weight
    return found
