"""A transformers checkpoint of the Llama kind as one GGUF file, for ids in and ids out.

llama.cpp rotates neighbouring components of a head where transformers rotates halves, so the rows
of query and key projections of a Llama are reordered; Qwen keeps its order. The vocabulary is
written as a number only: no text ever passes. One-dimensional weights are float32 in the file, as
llama.cpp wants them, after they were rounded to the precision asked for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from wire import Refused

FAMILIES = {  # architecture -> its name in GGUF, and whether query and key rows are reordered
    "LlamaForCausalLM": (gguf.MODEL_ARCH.LLAMA, True),
    "Qwen2ForCausalLM": (gguf.MODEL_ARCH.QWEN2, False),
    "Qwen3ForCausalLM": (gguf.MODEL_ARCH.QWEN3, False),
}
KINDS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
}
STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # numpy knows no bfloat16


def write(folder: Path, path: Path, dtype: str) -> None:
    """Write the checkpoint of `folder` to `path`, whole or not at all."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check(config, dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fill(part, folder, config, dtype)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def fill(path: Path, folder: Path, config: Mapping[str, Any], dtype: str) -> None:
    """The file's numbers and weights."""
    family, reordered = FAMILIES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(family, config["num_hidden_layers"])
    file = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[family], use_temp_file=True)
    describe(file, config)
    if factors := rope_factors(config):
        file.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    for name, weight in weights(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise Refused(
                f"{folder.name} as GGUF.",
                f"its weight {name} has no place in llama.cpp's {config['architectures'][0]}.",
                "leave the llama:* rows out.",
            )
        if reordered and name.endswith(("q_proj.weight", "q_proj.bias")):
            weight = neighbouring(weight, config["num_attention_heads"])
        if reordered and name.endswith(("k_proj.weight", "k_proj.bias")):
            weight = neighbouring(weight, kv_heads(config))
        add(file, known, weight, KINDS[dtype])
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def check(config: Mapping[str, Any], dtype: str) -> None:
    """Refuse by name what would be written wrongly."""
    family = (config.get("architectures") or ["a model without a named architecture"])[0]
    rope = rope_of(config)["rope_type"]
    wrong = {
        f"a {family}": family not in FAMILIES,
        f"{dtype}": dtype not in KINDS,
        f"{family} with rope {rope}": rope not in ("default", "llama3"),
        f"{family} with sliding windows": bool(config.get("use_sliding_window")),
        f"{family} with {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
    }
    for asked, refused in wrong.items():
        if refused:
            raise Refused(
                f"{asked} in a llama:* row.",
                f"GGUF files are written for {', '.join(FAMILIES)} in {', '.join(KINDS)}, with "
                "ordinary or llama3 rotary positions and full attention.",
                "leave the llama:* rows out, or compare on such a model.",
            )


def describe(file: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The numbers of the architecture."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    file.add_context_length(config["max_position_embeddings"])
    file.add_embedding_length(config["hidden_size"])
    file.add_block_count(config["num_hidden_layers"])
    file.add_feed_forward_length(config["intermediate_size"])
    file.add_head_count(heads)
    file.add_head_count_kv(kv_heads(config))
    file.add_key_length(width)
    file.add_value_length(width)
    file.add_rope_dimension_count(width)
    file.add_rope_freq_base(rope_of(config)["rope_theta"])
    file.add_layer_norm_rms_eps(config["rms_norm_eps"])
    file.add_vocab_size(config["vocab_size"])
    file.add_tokenizer_model("no_vocab")


def kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions, as older and newer transformers write them."""
    found = {"rope_theta": config.get("rope_theta") or 10000.0}
    found |= config.get("rope_scaling") or {}
    found |= config.get("rope_parameters") or {}
    return {**found, "rope_type": found.get("rope_type") or found.get("type") or "default"}


def rope_factors(config: Mapping[str, Any]) -> list[float]:
    """By what Llama 3.1 and later divide each frequency; nothing for ordinary positions."""
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return []
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    found = []
    for at in range(0, width, 2):
        turns = context / (2 * math.pi * rope["rope_theta"] ** (at / width))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1.0 / ((1.0 - share) / factor + share))
    return found


def weights(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 values of all weights, one at a time.

    A safetensors file is the length of its header, the header in JSON, and raw numbers.
    """
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            kind = np.dtype(STORED[entry["dtype"]])
            raw = np.memmap(path, kind, "r", 8 + length + begin, ((end - begin) // kind.itemsize,))
            if kind == np.uint16:  # the upper half of a float32
                raw = (raw.astype(np.uint32) << 16).view(np.float32)
            yield name, raw.astype(np.float32).reshape(entry["shape"])


def neighbouring(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first halves, second halves) to pairs of neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add(file: gguf.GGUFWriter, name: str, weight: np.ndarray, kind: Any) -> None:
    """One weight, rounded to `kind`."""
    rounded = quantize(weight, kind)
    if weight.ndim == 1:
        file.add_tensor(name, dequantize(rounded, kind).astype(np.float32))
    else:
        file.add_tensor(name, rounded, raw_dtype=kind)
