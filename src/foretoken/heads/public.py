"""Heads in the folders that their authors publish, read as heads of ours.

EAGLE-1 and EAGLE-2 keep a Llama of one layer beside `fc.weight` (github SafeAILab/EAGLE), Medusa
its heads in `medusa_lm_head` (github FasterDecoding/Medusa). A folder is known by its config.json
and by the names of its weights, of which only tensors are read: no file can run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.heads.decoder_layer import BASE, EPS

CONFIG = "config.json"
FILES = (
    "model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt",
)  # fmt: skip
LAYER = "layers.0."  # names of EAGLE's weights
MLP = {"mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
Tensors = Mapping[str, Tensor]


def is_public(folder: Path) -> bool:
    """Whether a folder may hold a published head: it has a config.json."""
    return (folder / CONFIG).is_file()


def document(folder: Path) -> dict[str, Any]:
    """What a head.json of ours would say of it; CheckpointError for another layout."""
    config, tensors, file = opened(folder)
    layout = layout_of(folder, config, tensors)
    kind, sizes, options = READERS[layout][0](folder, config, tensors)
    notes = {"layout": layout, "of": str(config.get("base_model_name_or_path", ""))}
    stamp = file.stat()
    return {
        "kind": kind, **sizes, "options": options, "notes": notes, "version": 1,
        "weights": f"{file.name}@{stamp.st_mtime_ns}-{stamp.st_size}",
    }  # fmt: skip


def weights(folder: Path) -> dict[str, Tensor]:
    """The tensors by our names, on the CPU."""
    config, tensors, _ = opened(folder)
    return READERS[layout_of(folder, config, tensors)][1](folder, config, tensors)


def opened(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], Path]:
    """The config, the tensors and the file they are in."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(folder, f"{CONFIG} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise unreadable(folder, f"{CONFIG} holds no object")
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise unreadable(folder, f"there is none of {', '.join(FILES)}")
    return config, tensors_of(folder, file), file


def tensors_of(folder: Path, file: Path) -> dict[str, Tensor]:
    """What a file of weights holds."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as kept:
                return {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise unreadable(folder, f"{file.name} cannot be read ({error})") from error
    except UnpicklingError as error:
        raise unreadable(folder, f"{file.name} is no file of tensors ({error})") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise unreadable(folder, f"{file.name} holds something else than tensors by their names")
    return found


def layout_of(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> str:
    """The name of the layout; CheckpointError for one that is not known here."""
    if "medusa_num_heads" in config:
        return "medusa"
    if "fc.weight" in tensors and any(name.startswith(LAYER) for name in tensors):
        joined = tensors["fc.weight"]
        if joined.ndim == 2 and joined.shape[1] == 2 * joined.shape[0]:
            return "eagle"
    raise unreadable(folder, f"its layout is none of {', '.join(READERS)}")


def eagle(
    folder: Path, config: Mapping[str, Any], tensors: Tensors
) -> tuple[str, dict[str, int], dict[str, Any]]:
    """Shape of an EAGLE head."""
    width = whole(folder, config, "hidden_size")
    heads = whole(folder, config, "num_attention_heads")
    if config.get("num_hidden_layers", 1) != 1 or any("layers.1." in name for name in tensors):
        raise unreadable(folder, "it has more layers than the one of an EAGLE head")
    refuse_scaled(folder, config)
    if config.get("hidden_act", "silu") != "silu":
        raise unreadable(folder, f"its activation is {config['hidden_act']}, not silu")
    rope = config.get("rope_parameters") or {}
    return (
        "eagle",
        {"hidden_size": width, "vocab_size": whole(folder, config, "vocab_size")},
        {
            "heads": heads,
            "inner": whole(folder, config, "intermediate_size"),
            "kv_heads": config.get("num_key_value_heads") or heads,
            "size": config.get("head_dim") or width // heads,
            "base": float(config.get("rope_theta") or rope.get("rope_theta") or BASE),
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


READERS = {"eagle": (eagle, eagle_weights), "medusa": (medusa, medusa_weights)}


def named(folder: Path, tensors: Tensors, name: str) -> Tensor:
    """A tensor by its name; CheckpointError where it is missing."""
    if name not in tensors:
        raise unreadable(folder, f"it lacks the tensor {name}")
    return tensors[name]


def whole(folder: Path, config: Mapping[str, Any], name: str) -> int:
    """A positive number of the config; CheckpointError where there is none."""
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise unreadable(folder, f"its {CONFIG} has {value!r} as {name}, where a number is needed")
    return value


def refuse_scaled(folder: Path, config: Mapping[str, Any]) -> None:
    """CheckpointError for rotary positions that are scaled."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind != "default":
        raise unreadable(folder, f"its rotary positions are scaled ({kind}), which no head is here")


def unreadable(folder: Path, why: str) -> CheckpointError:
    """The folder holds no head that can be used, and why."""
    return CheckpointError(
        f"a published head in {folder} was asked for.",
        f"{why}.",
        f"pass a whole folder of a known layout ({', '.join(READERS)}), or one that "
        "`foretoken train` wrote.",
    )
