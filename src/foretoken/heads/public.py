"""Heads in the folders that their authors publish, read as heads of ours.

EAGLE-1 and EAGLE-2 keep a Llama of one layer beside `fc.weight` (github SafeAILab/EAGLE), EAGLE-3
one that is twice as wide (`public_eagle3`), Medusa its heads in `medusa_lm_head` (github
FasterDecoding/Medusa), or under the names that vLLM gives them. A folder is known by its
config.json and by the names of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.heads.decoder_layer import EPS
from foretoken.heads.public_eagle3 import eagle3, eagle3_weights, is_eagle3
from foretoken.heads.public_files import (
    CONFIG,
    LAYOUTS,
    SCALE,
    Left,
    Tensors,
    embedding_scale,
    named,
    opened,
    rotary_base,
    tensors_of,
    unreadable,
    whole,
)

LAYER = "layers.0."  # names of EAGLE's weights
BLOCKS = "blocks."  # of Medusa's residual blocks, where vLLM's names are used
# of no use here: what the target says itself, and what is computed
IGNORED = ("embed_tokens.weight", "rotary_emb.inv_freq")
MLP = {"mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}


def is_public(folder: Path) -> bool:
    """Whether a folder may hold a published head: it has a config.json."""
    return (folder / CONFIG).is_file()


def document(folder: Path) -> dict[str, Any]:
    """What a head.json of ours would say of it; CheckpointError for another layout."""
    config, tensors, file = opened(folder)
    layout = layout_of(folder, config, tensors)
    kind, sizes, options = READERS[layout][0](folder, config, tensors)
    notes: dict[str, Any] = {"layout": layout, "of": target_of(config)}
    if layout == "eagle" and (scale := embedding_scale(folder, config)) != 1.0:
        notes[SCALE] = scale
    stamps = [place.stat() for place in (file, folder / CONFIG)]
    when = "-".join(f"{stamp.st_mtime_ns}-{stamp.st_size}" for stamp in stamps)
    return {
        "kind": kind, **sizes, "options": options, "notes": notes, "version": 1,
        "weights": f"{file.name}@{when}",
    }  # fmt: skip


def target_of(config: Mapping[str, Any]) -> str:
    """The name of the head's target; empty where the config says none."""
    found = config.get("base_model_name_or_path")
    if not found and isinstance(told := config.get("speculators_config"), Mapping):
        verifier = told.get("verifier")
        found = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return found if isinstance(found, str) else ""


def weights(folder: Path) -> dict[str, Tensor]:
    """The tensors by our names, on the CPU."""
    config, shapes, file = opened(folder)
    read = READERS[layout_of(folder, config, shapes)][1]
    return read(folder, config, tensors_of(folder, file))


def layout_of(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> str:
    """The name of the layout; CheckpointError for one that is not known here."""
    if "medusa_num_heads" in config or f"{BLOCKS}0.layers.0.weight" in tensors:
        return "medusa"
    if is_eagle3(config, tensors):
        return "eagle3"
    if "fc.weight" in tensors and any(name.startswith(LAYER) for name in tensors):
        joined = tensors["fc.weight"]
        if joined.ndim == 2 and joined.shape[1] == 2 * joined.shape[0]:
            return "eagle"
    raise unreadable(folder, f"its layout is none of {', '.join(LAYOUTS)}")


def eagle(
    folder: Path, config: Mapping[str, Any], tensors: Tensors
) -> tuple[str, dict[str, int], dict[str, Any]]:
    """Shape of an EAGLE head."""
    width = whole(folder, config, "hidden_size")
    heads = whole(folder, config, "num_attention_heads")
    if config.get("num_hidden_layers", 1) != 1 or any("layers.1." in name for name in tensors):
        raise unreadable(folder, "it has more layers than the one of an EAGLE head")
    if config.get("hidden_act", "silu") != "silu":
        raise unreadable(folder, f"its activation is {config['hidden_act']}, not silu")
    return (
        "eagle",
        {"hidden_size": width, "vocab_size": whole(folder, config, "vocab_size")},
        {
            "heads": heads,
            "inner": whole(folder, config, "intermediate_size"),
            "kv_heads": config.get("num_key_value_heads") or heads,
            "size": config.get("head_dim") or width // heads,
            "base": rotary_base(folder, config),
            "eps": float(config.get("rms_norm_eps") or EPS),
            "bias": f"{LAYER}self_attn.q_proj.bias" in tensors,
            "join_bias": "fc.bias" in tensors,
            "begins": 1,
        },
    )


def eagle_weights(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> dict[str, Tensor]:
    """An EAGLE head's tensors; copies of the target's embeddings and outputs are left aside.

    CheckpointError for a tensor that is not understood.
    """
    _, sizes, wanted = eagle(folder, config, tensors)
    left, attention = Left(folder, tensors), f"{LAYER}self_attn."
    embedded, before = left.taken("fc.weight").chunk(2, 1)
    found = {
        # Tokens enter here as the target embeds them, of which `export` made `fc` do a part.
        "join.weight": torch.cat([embedded / embedding_scale(folder, config), before], 1),
        "layer.joined.weight": left.taken(f"{attention}o_proj.weight"),
        "layer.between.weight": left.taken(f"{LAYER}post_attention_layernorm.weight"),
    }
    for what in ("weight", "bias") if wanted["bias"] else ("weight",):
        parts = [left.taken(f"{attention}{part}_proj.{what}") for part in "qkv"]
        found[f"layer.attention.{what}"] = torch.cat(parts)
    for theirs, ours in MLP.items():
        found[f"layer.{ours}.weight"] = left.taken(f"{LAYER}{theirs}.weight")
    if wanted["join_bias"]:
        found["join.bias"] = left.taken("fc.bias")
    if f"{LAYER}input_layernorm.weight" in tensors:
        raise unreadable(folder, "its layer has a first norm, which no EAGLE head has")
    outputs = tensors.get("lm_head.weight")
    width, padded = sizes["hidden_size"], sizes["vocab_size"]  # or more rows than tokens
    if outputs is not None and outputs.shape[-1] == width and len(outputs) >= padded:
        left.taken("lm_head.weight")  # the target's, which is asked itself
    left.refuse_all_but(IGNORED, "EAGLE")
    return found


def medusa(
    folder: Path, config: Mapping[str, Any], tensors: Tensors
) -> tuple[str, dict[str, int], dict[str, Any]]:
    """Shape of Medusa's heads: as many as the file holds, whatever smaller number is in use."""
    config, tensors = as_published(folder, config, tensors)
    blocks = whole(folder, config, "medusa_num_layers")
    held = {name.split(".")[0] for name in tensors}
    depth = max(len(held), whole(folder, config, "medusa_num_heads"))
    last = named(folder, tensors, f"0.{blocks}.weight")
    sizes = {"hidden_size": last.shape[1], "vocab_size": last.shape[0]}
    return "medusa", sizes, {"depth": depth, "blocks": blocks}


def medusa_weights(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> dict[str, Tensor]:
    """Medusa's tensors, which differ from ours in a prefix."""
    config, tensors = as_published(folder, config, tensors)
    shape = medusa(folder, config, tensors)[2]
    left, found = Left(folder, tensors), {}
    for head in range(shape["depth"]):
        own = [f"{head}.{block}.linear.{part}" for block in range(shape["blocks"])
               for part in ("weight", "bias")]  # fmt: skip
        for name in (*own, f"{head}.{shape['blocks']}.weight"):
            found[f"heads.{name}"] = left.taken(name)
    left.refuse_all_but((), "Medusa")
    return found


def as_published(
    folder: Path, config: Mapping[str, Any], tensors: Tensors
) -> tuple[Mapping[str, Any], Tensors]:
    """Medusa's heads in vLLM's names by those of their authors; others as they are.

    There layers without biases are possible, which are biases of zeros; CheckpointError for
    tensors of other variants, such as a list of few tokens.
    """
    if f"{BLOCKS}0.layers.0.weight" not in tensors:
        return config, tensors
    sizes = {
        ours: config[name] if name in config else config.get(ours)
        for name, ours in (("num_heads", "medusa_num_heads"),
                           ("num_hidden_layers", "medusa_num_layers"))
    }  # fmt: skip
    depth, blocks = (whole(folder, sizes, name) for name in sizes)
    if config.get("logit_scale", 1.0) != 1.0:
        raise unreadable(folder, "it has a logit_scale, which is not computed here")
    left, found = Left(folder, tensors), {}
    for head in range(depth):
        for block in range(blocks):
            own = f"{BLOCKS}{head}.layers.{block}"
            weight = left.taken(f"{own}.weight")
            bias = weight.new_zeros(len(weight))
            found[f"{head}.{block}.linear.weight"] = weight
            found[f"{head}.{block}.linear.bias"] = (
                left.taken(f"{own}.bias") if f"{own}.bias" in tensors else bias
            )
        found[f"{head}.{blocks}.weight"] = left.taken(f"lm_heads.{head}.weight")
    left.refuse_all_but((), "Medusa")
    return {**config, **sizes}, found


READERS = {
    "eagle": (eagle, eagle_weights),
    "eagle3": (eagle3, eagle3_weights),
    "medusa": (medusa, medusa_weights),
}
