"""EAGLE-3 heads as they are published: by their authors, and as `speculators` directories.

The authors' files name the layer `midlayer` (github SafeAILab/EAGLE); speculators name it
`layers.0` and keep a Llama's configuration in `transformer_layer_config` (github
vllm-project/speculators). Their `d2t` holds offsets: output i is the target's token i + d2t[i].
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.heads.decoder_layer import EPS
from foretoken.heads.public_files import Left, Tensors, named, rotary, unreadable, whole
from foretoken.heads.table import fits_vocabulary
from foretoken.heads.wide_eagle3 import PLACES

LOG = logging.getLogger(__name__)
AUX = "eagle_aux_hidden_state_layer_ids"  # where it reads its target
LAYERS = ("midlayer.", "layers.0.")
RENAMED = {
    "self_attn.o_proj": "joined", "mlp.gate_proj": "gate", "mlp.up_proj": "up",
    "mlp.down_proj": "down", "input_layernorm": "norms.embedding",
    "hidden_norm": "norms.state", "post_attention_layernorm": "norms.between",
}  # fmt: skip
# of no use here: what the target says itself, and what is computed
IGNORED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
# variants that are not computed here
ABSENT = ("norm_before_fc", "fc_norm", "norm_output", "return_hidden_post_norm", "mlp_bias")


def is_eagle3(config: Mapping[str, Any], tensors: Tensors) -> bool:
    """Whether a folder's layout is one of those below."""
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    return f"{LAYERS[1]}hidden_norm.weight" in tensors or any(
        name.startswith(LAYERS[0]) for name in tensors
    )


def eagle3(
    folder: Path, config: Mapping[str, Any], tensors: Tensors
) -> tuple[str, dict[str, int], dict[str, Any]]:
    """Shape of an EAGLE-3 head."""
    speculators = "speculators_model_type" in config
    llama = config.get("transformer_layer_config", {}) if speculators else config
    if not isinstance(llama, Mapping):
        raise unreadable(folder, "its transformer_layer_config is no object")
    refuse_variants(folder, config, llama, tensors)
    taps, vocab_size = places(folder, config), whole(folder, llama, "vocab_size")
    fused = named(folder, tensors, "fc.weight")
    count = len(taps) or PLACES
    if fused.ndim != 2 or fused.shape[1] % count:
        raise unreadable(folder, f"its fc.weight is not for {count} states of a target")
    state, heads = whole(folder, llama, "hidden_size"), whole(folder, llama, "num_attention_heads")
    outputs = named(folder, tensors, "lm_head.weight")
    base, scaling = rotary(folder, llama)
    options = {
        "taps": taps, "tokens": len(outputs), "state": state, "heads": heads,
        "kv_heads": llama.get("num_key_value_heads") or heads,
        "size": llama.get("head_dim") or state // heads,
        "inner": whole(folder, llama, "intermediate_size"),
        "base": base, "scaling": scaling, "eps": float(llama.get("rms_norm_eps") or EPS),
        "bias": f"{layer_of(tensors)}self_attn.q_proj.bias" in tensors,
        "join_bias": "fc.bias" in tensors, "embeds": "embed_tokens.weight" in tensors,
        "normed_residual": bool(config.get("norm_before_residual", speculators)),
    }  # fmt: skip
    hidden = fused.shape[1] // count
    if not options["embeds"] and hidden != state:
        raise unreadable(folder, f"it is {state} wide and reads embeddings of {hidden}")
    return "eagle3-wide", {"hidden_size": hidden, "vocab_size": vocab_size}, options


def eagle3_weights(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> dict[str, Tensor]:
    """An EAGLE-3 head's tensors by our names; CheckpointError for one that is not understood."""
    _, sizes, options = eagle3(folder, config, tensors)
    layer, left = layer_of(tensors), Left(folder, tensors)
    taken = left.taken
    found = {"fuse.weight": taken("fc.weight"), "norms.last.weight": taken("norm.weight")}
    for theirs, ours in RENAMED.items():
        found[f"{ours}.weight"] = taken(f"{layer}{theirs}.weight")
    for what in ("weight", "bias") if options["bias"] else ("weight",):
        parts = [taken(f"{layer}self_attn.{part}_proj.{what}") for part in "qkv"]
        found[f"attention.{what}"] = torch.cat(parts)
    if options["join_bias"]:
        found["fuse.bias"] = taken("fc.bias")
    if options["embeds"]:
        found["embedding.weight"] = taken("embed_tokens.weight")
    found["output.weight"] = taken("lm_head.weight")
    found["scored"] = scored(folder, sizes["vocab_size"], options["tokens"], left.pop("d2t", None))
    left.refuse_all_but(IGNORED, "EAGLE-3")
    return found


def scored(folder: Path, vocab_size: int, outputs: int, offsets: Tensor | None) -> Tensor:
    """The target's token of each output."""
    if offsets is None:
        if outputs != vocab_size:
            raise unreadable(folder, f"it lacks the tensor d2t, and has {outputs} outputs alone")
        return torch.arange(outputs)
    if offsets.shape != (outputs,) or offsets.is_floating_point():
        raise unreadable(folder, f"its d2t is no list of {outputs} offsets")
    tokens = torch.arange(outputs) + offsets
    if not fits_vocabulary(tokens, vocab_size):
        raise unreadable(folder, f"its d2t leads to tokens twice, or outside of 0 to {vocab_size}")
    return tokens


def places(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Where it reads the target, i being behind i layers; () where the config says nothing.

    Beside the architecture ids count so already; in `eagle_config` (ModelOpt) 0 is the output of
    the first layer.
    """
    found, shift, nested = config.get(AUX), 0, config.get("eagle_config")
    if not found and isinstance(nested, Mapping):
        found, shift = nested.get(AUX), 1
    if not found:
        return ()
    if not isinstance(found, list) or not all(type(i) is int and i >= 0 for i in found):
        raise unreadable(folder, f"its {AUX} is {found!r}, where layers of the target are needed")
    return tuple(i + shift for i in found)


def refuse_variants(
    folder: Path, config: Mapping[str, Any], llama: Mapping[str, Any], tensors: Tensors
) -> None:
    """CheckpointError for heads that compute something else."""
    several = llama.get("num_hidden_layers", 1) != 1
    if several or any(name.startswith("layers.1.") for name in tensors):
        raise unreadable(folder, "it has more layers than the one of an EAGLE-3 head")
    if llama.get("hidden_act", "silu") != "silu":
        raise unreadable(folder, f"its activation is {llama['hidden_act']}, not silu")
    nested = config.get("eagle_config")
    told = (config, llama, nested if isinstance(nested, Mapping) else {})
    for name in ABSENT:
        if any(one.get(name) for one in told):
            raise unreadable(folder, f"it has {name}, which is not computed here")
    if llama.get("sliding_window") and llama.get("use_sliding_window", True):
        LOG.warning(
            "%s: its layer learned to see the last %s tokens and sees all of them here; guesses "
            "behind longer texts may be worse", folder, llama["sliding_window"],
        )  # fmt: skip


def layer_of(tensors: Tensors) -> str:
    """What precedes the names of its layer's tensors."""
    return LAYERS[any(name.startswith(LAYERS[1]) for name in tensors)]
