"""Heads in the folders that their authors publish, read as heads of ours.

EAGLE-1 and EAGLE-2 keep a Llama of one layer beside `fc.weight` (github SafeAILab/EAGLE), EAGLE-3
one that is twice as wide (`public_eagle3`), Medusa its heads in `medusa_lm_head` (github
FasterDecoding/Medusa). A folder is known by its config.json and by the names of its weights.
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
    Tensors,
    named,
    opened,
    rotary_base,
    unreadable,
    whole,
)

LAYER = "layers.0."  # names of EAGLE's weights
MLP = {"mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}


def is_public(folder: Path) -> bool:
    """Whether a folder may hold a published head: it has a config.json."""
    return (folder / CONFIG).is_file()


def document(folder: Path) -> dict[str, Any]:
    """What a head.json of ours would say of it; CheckpointError for another layout."""
    config, tensors, file = opened(folder)
    layout = layout_of(folder, config, tensors)
    kind, sizes, options = READERS[layout][0](folder, config, tensors)
    notes = {"layout": layout, "of": str(config.get("base_model_name_or_path", ""))}
    stamps = [place.stat() for place in (file, folder / CONFIG)]
    when = "-".join(f"{stamp.st_mtime_ns}-{stamp.st_size}" for stamp in stamps)
    return {
        "kind": kind, **sizes, "options": options, "notes": notes, "version": 1,
        "weights": f"{file.name}@{when}",
    }  # fmt: skip


def weights(folder: Path) -> dict[str, Tensor]:
    """The tensors by our names, on the CPU."""
    config, tensors, _ = opened(folder)
    return READERS[layout_of(folder, config, tensors)][1](folder, config, tensors)


def layout_of(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> str:
    """The name of the layout; CheckpointError for one that is not known here."""
    if "medusa_num_heads" in config:
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
    """An EAGLE head's tensors; the copy of the target's embeddings is left aside."""
    wanted = eagle(folder, config, tensors)[2]
    attention = f"{LAYER}self_attn."
    found = {
        "join.weight": named(folder, tensors, "fc.weight"),
        "layer.joined.weight": named(folder, tensors, f"{attention}o_proj.weight"),
        "layer.between.weight": named(folder, tensors, f"{LAYER}post_attention_layernorm.weight"),
    }
    for what in ("weight", "bias") if wanted["bias"] else ("weight",):
        parts = [named(folder, tensors, f"{attention}{part}_proj.{what}") for part in "qkv"]
        found[f"layer.attention.{what}"] = torch.cat(parts)
    for theirs, ours in MLP.items():
        found[f"layer.{ours}.weight"] = named(folder, tensors, f"{LAYER}{theirs}.weight")
    if wanted["join_bias"]:
        found["join.bias"] = tensors["fc.bias"]
    if f"{LAYER}input_layernorm.weight" in tensors:
        raise unreadable(folder, "its layer has a first norm, which no EAGLE head has")
    return found


def medusa(
    folder: Path, config: Mapping[str, Any], tensors: Tensors
) -> tuple[str, dict[str, int], dict[str, Any]]:
    """Shape of Medusa's heads: as many as the file holds, whatever smaller number is in use."""
    blocks = whole(folder, config, "medusa_num_layers")
    held = {name.split(".")[0] for name in tensors}
    depth = max(len(held), whole(folder, config, "medusa_num_heads"))
    last = named(folder, tensors, f"0.{blocks}.weight")
    sizes = {"hidden_size": last.shape[1], "vocab_size": last.shape[0]}
    return "medusa", sizes, {"depth": depth, "blocks": blocks}


def medusa_weights(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> dict[str, Tensor]:
    """Medusa's tensors, which differ from ours in a prefix."""
    shape = medusa(folder, config, tensors)[2]
    found = {}
    for head in range(shape["depth"]):
        own = [f"{head}.{block}.linear.{part}" for block in range(shape["blocks"])
               for part in ("weight", "bias")]  # fmt: skip
        for name in (*own, f"{head}.{shape['blocks']}.weight"):
            found[f"heads.{name}"] = named(folder, tensors, name)
    return found


READERS = {
    "eagle": (eagle, eagle_weights),
    "eagle3": (eagle3, eagle3_weights),
    "medusa": (medusa, medusa_weights),
}
