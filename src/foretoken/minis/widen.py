"""Net2Net widening: a mini becomes as large as asked and computes the same function (Chen et al.,
2016).

Every hidden channel, head and intermediate unit is duplicated `factor` times and the weights that
read them are divided by `factor`. Duplicates stay equal in what they compute but not in their
weights: each reading weight gets noise whose sum over the duplicates of its input is zero. RMSNorm
does not see duplication, so it is copied; the tied output head would count every channel `factor`
times, so the last norm is divided instead. Added layers write nothing into the residual stream.

The result has the cost of a large model and the behaviour of a small one. It measures machinery,
nothing else.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from foretoken.errors import CapabilityError, CheckpointError, ConfigError
from foretoken.training.bar import tracked

_NOISE = 0.1  # of a weight matrix's own standard deviation
_SHARD_BYTES = 2_000_000_000
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.model",
)
_READS_AND_WRITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def widen(
    model: PreTrainedModel, params: float = 350e6, *, seed: int = 0
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A float32 model of about `params` parameters with the logits of `model`, and a report."""
    factor, layers = plan(model.config, params)
    config = widened_config(model.config, factor, layers)
    source = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        wide = type(model)(config)
    state = dict(widened_tensors(source, model.config, factor, layers, seed))
    wide.load_state_dict(state, assign=True, strict=False)
    wide.tie_weights()
    _rebuild_rotary(wide, config)
    wide.eval()
    difference = logit_difference(copy.deepcopy(model).float(), wide)
    return wide, report(model.config, config, factor, difference, torch.float32)


def widen_directory(
    source: str | Path,
    out: str | Path,
    params: float = 350e6,
    *,
    seed: int = 0,
    dtype: torch.dtype | str = torch.float32,
    progress: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Widen the model in folder `source` into the new folder `out`, one shard at a time; returns
    the report.

    `verify` loads the result and measures its logits against the source's. Nothing is left behind
    on failure.
    """
    source, out, dtype = Path(source), Path(out), _dtype(dtype)
    config, tensors = _read(source)
    factor, layers = plan(config, params)
    wide = widened_config(config, factor, layers)
    wide.dtype = dtype
    with _whole_or_nothing(out) as partial:
        made = widened_tensors(tensors, config, factor, layers, seed)
        stored = ((name, tensor.to(dtype)) for name, tensor in made)
        _write_shards(partial, stored, _expected(config, layers) if progress else 0)
        wide.save_pretrained(partial)
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        difference = _measure(source, partial, dtype) if verify else None
        found = report(config, wide, factor, difference, dtype)
        (partial / "widening.json").write_text(json.dumps(found, indent=2) + "\n")
        (partial / "README.md").write_text(describe(found))
    return found


@contextmanager
def _whole_or_nothing(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` at the end, or disappears on failure."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(
            asked=f"widening into {out}",
            possible="it exists and is not empty",
            do="name a new folder",
        )
    partial = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=".widening-"))
        yield partial
        partial.chmod(0o755)
        if out.is_dir():
            out.rmdir()
        os.replace(partial, out)
    except (OSError, SafetensorError) as error:
        raise _unwritable(out, error) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _dtype(name: torch.dtype | str) -> torch.dtype:
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if name not in kinds:
        raise ConfigError(
            asked=f"weights stored as {name}", possible=", ".join(kinds), do="name one of these"
        )
    return kinds[name]


def plan(config: PreTrainedConfig, params: float) -> tuple[int, int]:
    """The width factor and the number of added layers that come closest to `params`, preferring
    width.
    """
    if config.model_type != "llama":
        raise CapabilityError(
            asked=f"widening a {config.model_type!r} model",
            possible="Llama models, such as the minis",
            do="widen a mini, or measure with the model as it is",
        )
    if not params >= count(config, 1, 0) * 0.99:
        raise ConfigError(
            asked=f"a widened model of {params:,.0f} parameters",
            possible=f"{count(config, 1, 0):,} (the model itself) and more",
            do="ask for more parameters",
        )
    factor = 1
    while count(config, factor + 1, 0) <= params * 1.01:
        factor += 1
    missing = params - count(config, factor, 0)
    return factor, max(0, round(missing / (count(config, factor, 1) - count(config, factor, 0))))


def count(config: PreTrainedConfig, factor: int, added: int) -> int:
    """Parameters of `config` widened by `factor` with `added` layers."""
    width, inner = config.hidden_size * factor, config.intermediate_size * factor
    heads, kv = config.num_attention_heads * factor, config.num_key_value_heads * factor
    layer = 2 * width * config.head_dim * (heads + kv) + 3 * width * inner + 2 * width
    if config.attention_bias:
        layer += config.head_dim * (heads + 2 * kv) + width
    if config.mlp_bias:
        layer += 2 * inner + width
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * width
    return (config.num_hidden_layers + added) * layer + tables + width


def widened_config(config: PreTrainedConfig, factor: int, added: int) -> PreTrainedConfig:
    """The same architecture with every width multiplied and some layers added."""
    wide = copy.deepcopy(config)
    wide.hidden_size *= factor
    wide.intermediate_size *= factor
    wide.num_attention_heads *= factor
    wide.num_key_value_heads *= factor
    wide.num_hidden_layers += added
    return wide


def widened_tensors(
    source: Mapping[str, Tensor], config: PreTrainedConfig, factor: int, added: int, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the widened model, one after the other, in float32."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in source.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        yield name, _widened(name, tensor.float(), factor, generator)
    last = config.num_hidden_layers - 1
    for i in range(added):
        for name, tensor in source.items():
            if f".layers.{last}." not in name:
                continue
            wide = _widened(name, tensor.float(), factor, generator)
            if "o_proj" in name or "down_proj" in name:
                wide.zero_()
            yield name.replace(f".layers.{last}.", f".layers.{last + 1 + i}."), wide


def _widened(name: str, tensor: Tensor, factor: int, generator: torch.Generator) -> Tensor:
    if tensor.ndim == 1:  # norms and biases
        wide = tensor.repeat(factor)
        return wide / factor if name == "model.norm.weight" else wide
    if name.split(".")[-2] in _READS_AND_WRITES:
        return _duplicated(tensor, factor, generator)
    return tensor.repeat(1, factor)  # embedding and output head: one row per token


def _duplicated(weight: Tensor, factor: int, generator: torch.Generator) -> Tensor:
    """[out, in] -> [factor * out, factor * in]: divided over the copies of the input, plus noise
    that cancels there.
    """
    rows, columns = weight.shape
    wide = torch.randn(rows * factor, factor, columns, generator=generator)
    wide -= wide.mean(1, keepdim=True)
    wide *= _NOISE * float(weight.std()) / factor
    wide += weight.repeat(factor, 1)[:, None] / factor
    return wide.reshape(rows * factor, factor * columns)


def _read(source: Path) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    """Config and tensors of a model folder; safetensors only."""
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    if not files or not (source / "config.json").is_file():
        raise CheckpointError(
            asked=f"widening {source}",
            possible="a folder with config.json and safetensors weights",
            do="name such a folder, for instance one of the minis",
        )
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= load_file(path)
    return AutoConfig.from_pretrained(source), tensors


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]], expected: int) -> None:
    """Safetensors files of bounded size and their index, holding one shard in memory at a time."""
    where: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    total = size = number = 0
    for name, tensor in tracked(tensors, "widening", expected, show=expected > 0):
        if shard and size + tensor.nbytes > _SHARD_BYTES:
            save_file(shard, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
            shard, size, number = {}, 0, number + 1
        shard[name], where[name] = tensor.contiguous(), number
        size, total = size + tensor.nbytes, total + tensor.nbytes
    save_file(shard, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    names = [f"model-{i + 1:05d}-of-{number + 1:05d}.safetensors" for i in range(number + 1)]
    for i, name in enumerate(names if number else ["model.safetensors"]):
        os.replace(folder / f"part-{i}.safetensors", folder / name)
    if number:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[i] for name, i in where.items()},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _expected(config: PreTrainedConfig, added: int) -> int:
    return 9 * (config.num_hidden_layers + added) + 2


def _rebuild_rotary(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Rotary frequencies are buffers outside the state dict; on the meta device they have no
    values.
    """
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config)


def _measure(source: Path, wide: Path, dtype: torch.dtype) -> float:
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    large = AutoModelForCausalLM.from_pretrained(wide, dtype=dtype).eval()
    return logit_difference(small, large)


@torch.inference_mode()
def logit_difference(small: PreTrainedModel, large: PreTrainedModel, length: int = 64) -> float:
    """Largest absolute difference of logits on tokens spread over the vocabulary."""
    tokens = torch.linspace(0, small.config.vocab_size - 1, length).long()[None]
    tokens = tokens[:, torch.randperm(length, generator=torch.Generator().manual_seed(0))]
    a, b = (
        model(input_ids=tokens.to(model.device)).logits.float().cpu() for model in (small, large)
    )
    return float((a - b).abs().max())


def report(
    config: PreTrainedConfig,
    wide: PreTrainedConfig,
    factor: int,
    difference: float | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What was made, in numbers."""
    added = wide.num_hidden_layers - config.num_hidden_layers
    return {
        "what": "function-preserving widening: cost of a large model, behaviour of a small one",
        "parameters_before": count(config, 1, 0),
        "parameters_after": count(config, factor, added),
        "width_factor": factor,
        "layers_added": added,
        "hidden_size": wide.hidden_size,
        "intermediate_size": wide.intermediate_size,
        "attention_heads": wide.num_attention_heads,
        "layers": wide.num_hidden_layers,
        "dtype": str(dtype).removeprefix("torch."),
        "max_abs_logit_difference": difference,
    }


def describe(found: Mapping[str, Any]) -> str:
    """The report as a short text."""
    difference = found["max_abs_logit_difference"]
    measured = (
        "was not measured"
        if difference is None or math.isnan(difference)
        else f"is {difference:.2e}"
    )
    return (
        "# A widened mini\n\n"
        f"This model has {found['parameters_after']:,} parameters made of "
        f"{found['parameters_before']:,}: every width times {found['width_factor']}, "
        f"{found['layers_added']} layers added that change nothing. It costs what a large model "
        "costs and behaves as the small one it came from; it is for measuring machinery, and its "
        f"answers are those of the small model.\n\nStored as {found['dtype']}. The largest "
        f"difference between its logits and the small model's {measured}.\n"
    )


def _unwritable(out: Path, error: Exception) -> ConfigError:
    return ConfigError(
        asked=f"widening into {out}",
        possible=f"it cannot be written ({error})",
        do="choose another folder or free space",
    )
