"""Heads written in the folders that their authors publish, as other engines load them.

The way back of `public`: config.json and weights by the field's names (github SafeAILab/EAGLE,
FasterDecoding/Medusa, vllm-project/speculators), of heads that compute what these names stand for.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from foretoken.errors import CheckpointError, ConfigError, meant
from foretoken.heads import store
from foretoken.heads.files import move
from foretoken.heads.public import LAYER, MLP
from foretoken.heads.public_eagle3 import AUX, LAYERS, RENAMED
from foretoken.heads.public_files import CONFIG, SCALE

POSITIONS = 32_768  # of a text, where no target says how many it may have
SOME = 64  # tokens whose embeddings are looked at
Folder = tuple[dict[str, Any], dict[str, Tensor]]  # config.json and the tensors


@dataclass(frozen=True, slots=True)
class Base:
    """What a published folder repeats of the head's target."""

    name: str = ""
    positions: int = POSITIONS
    embeddings: Tensor | None = None  # [V, H]; None: whoever loads the head has the target's
    architectures: tuple[str, ...] = ()  # of the target's config; (): not known
    scale: float = 1.0  # of embeddings as they enter the target's first layer, over these rows

    @classmethod
    def of(cls, model: Any, name: str) -> Base:
        """Of a transformers model."""
        config = model.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None) or POSITIONS
        table = model.get_input_embeddings()
        named = tuple(model.config.architectures or (type(model).__name__,))
        return cls(name, positions, table.weight.detach().cpu(), named, scale_of(table))


@torch.no_grad()
def scale_of(table: Any) -> float:
    """How many times its row of the table a token's embedding is: sqrt(H) in Gemma, else 1."""
    ids = torch.arange(min(SOME, len(table.weight)), device=table.weight.device)
    rows, entering = table.weight[ids].float(), table(ids).float()
    if torch.equal(rows, entering):
        return 1.0
    return float((rows * entering).sum() / rows.square().sum())


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of writing heads, and the kinds that can be written so."""

    kinds: tuple[str, ...]
    summary: str
    write: Callable[[Any, Base], Folder]
    file: str = "model.safetensors"


def export(folder: str | Path, to: str | Path, layout: str, base: Base | None = None) -> Path:
    """Write the head of `folder` as a new folder `to` in a published layout.

    CheckpointError where there is no such head, or where `to` holds something or cannot be
    written; ConfigError for a head that the layout cannot express. Without a name in `base` the
    target is called as the head's notes call it.
    """
    if layout not in LAYOUTS:
        raise ConfigError(
            f"the layout {layout!r} was asked for.",
            f"layouts are {', '.join(LAYOUTS)}.",
            f"{meant(layout, LAYOUTS)} `foretoken heads export --help` names them.",
        )
    card, base = store.card_of(folder), base or Base()
    way = LAYOUTS[layout]
    if card.kind not in way.kinds:
        others = [name for name, other in LAYOUTS.items() if card.kind in other.kinds]
        do = f"write it as {' or '.join(others)}" if others else "no published layout computes it"
        raise inexpressible(card.kind, layout, f"it is for {' or '.join(way.kinds)} heads", do)
    if base.embeddings is not None:
        vocab, width = base.embeddings.shape
        store.check_fits(card, folder, width, vocab)
    base = replace(base, name=base.name or str(card.notes.get("of") or ""))
    if base.embeddings is None:  # of a folder that was written so, for a target not named again
        base = replace(base, scale=float(card.notes.get(SCALE) or 1.0))
    head, _ = store.load(folder, card.kind)
    config, tensors = way.write(head, base)
    dtype = dtype_of(store.read_weights(folder, card))
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    kept = {name: copied(part, dtype) for name, part in tensors.items()}
    return written(Path(to), way.file, config, kept)


def dtype_of(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The one that all numbers of a head are stored in; of several, what holds each of them."""
    found = {part.dtype for part in weights.values() if part.is_floating_point()}
    return found.pop() if len(found) == 1 else torch.float32


def eagle(head: Any, base: Base) -> Folder:
    """EAGLE-1 and EAGLE-2: a Llama of one layer without its first norm, beside `fc`."""
    config, layer = head.config, head.layer
    if config.begins == 0:
        raise inexpressible(
            "eagle", "eagle", "this one reads a text's first token, which published heads never do",
            "train it anew with `foretoken train eagle`: heads skip that token now",
        )  # fmt: skip
    embedded, before = head.join.weight.chunk(2, 1)
    tensors = {
        # Others read rows of the table as they are: what the target makes of them is left to fc.
        "fc.weight": torch.cat([embedded * base.scale, before], 1),
        f"{LAYER}self_attn.o_proj.weight": layer.joined.weight,
        f"{LAYER}post_attention_layernorm.weight": layer.between.weight,
        **{f"{LAYER}{name}.weight": getattr(layer, own).weight for name, own in MLP.items()},
        **queries_keys_values(layer.attention, layer.sizes, LAYER),
    }
    if base.embeddings is not None:
        tensors["embed_tokens.weight"] = base.embeddings
    if config.join_bias:
        tensors["fc.bias"] = head.join.bias
    shape = llama(config, base, config.hidden_size, layer.shared, layer.size)
    return {
        **shape,
        "bias": config.join_bias,
        "qkv_bias": config.bias,  # of these three maps alone, which `attention_bias` would not say
        "attention_bias": False,
        **({} if base.scale == 1.0 else {SCALE: base.scale}),
    }, tensors


def medusa(head: Any, base: Base) -> Folder:
    """Medusa: residual blocks and an output layer by depth."""
    config = head.config
    if config.tokens:
        raise inexpressible(
            "medusa", "medusa", f"this one scores {config.tokens} tokens alone, published ones all",
            "train it with `--set vocabulary=0`",
        )  # fmt: skip
    tensors = {name.removeprefix("heads."): part for name, part in head.state_dict().items()}
    return {
        "architectures": ["MedusaModel"], "model_type": "medusa",
        "medusa_num_heads": config.depth, "medusa_num_layers": config.blocks,
        "medusa_fc_bias": True, "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size, "base_model_name_or_path": base.name,
    }, tensors  # fmt: skip


def eagle3(head: Any, base: Base) -> Folder:
    """EAGLE-3 as its authors name it: the layer is `midlayer`.

    The places it reads are told twice: beside the architecture i is behind i layers, which vLLM
    reads, and in `eagle_config` the output of layer i, counted from 0, which SGLang reads.
    """
    config = head.config
    layer = {name.replace(LAYERS[1], LAYERS[0]): part for name, part in wide(head).items()}
    shape = llama(config, base, head.state, head.shared, head.size)
    extra = {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(head.scored),
        "norm_before_residual": config.normed_residual, "target_hidden_size": config.hidden_size,
    }  # fmt: skip
    places: dict[str, Any] = {AUX: list(config.taps)} if config.taps else {}
    if config.taps and 0 not in config.taps:  # no layer puts out what enters the first
        outputs = [place - 1 for place in config.taps]
        places["eagle_config"] = {"use_aux_hidden_state": True, AUX: outputs}
    return {**shape, **extra, **places}, layer


def speculators(head: Any, base: Base) -> Folder:
    """EAGLE-3 as a `speculators` directory: its layer is `layers.0`, its Llama stands apart."""
    config = head.config
    if not base.name:
        raise inexpressible(
            "eagle3-wide", "speculators", "a speculators directory names its target, and nothing "
            "says which this head's is", "pass the target: `--target DIR_OR_NAME`",
        )  # fmt: skip
    llama_config = llama(config, base, head.state, head.shared, head.size)
    places = {AUX: list(config.taps)} if config.taps else {}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1,
                "accept_tolerance": 0.0}  # fmt: skip
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0", "draft_vocab_size": len(head.scored),
        "norm_before_residual": config.normed_residual, "target_hidden_size": config.hidden_size,
        "transformer_layer_config": llama_config, **places,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": base.name, "architectures": list(base.architectures)},
        },
    }, wide(head)  # fmt: skip


def wide(head: Any) -> dict[str, Tensor]:
    """Tensors of an EAGLE-3 head, its layer named as in `speculators`."""
    config, layer = head.config, LAYERS[1]
    sizes = [head.heads * head.size, head.shared * head.size, head.shared * head.size]
    tensors = {
        "fc.weight": head.fuse.weight,
        "norm.weight": head.norms["last"].weight,
        "lm_head.weight": head.output.weight,
        **{
            f"{layer}{name}.weight": head.get_submodule(own).weight for name, own in RENAMED.items()
        },
        **queries_keys_values(head.attention, sizes, layer),
    }
    if config.join_bias:
        tensors["fc.bias"] = head.fuse.bias
    if config.embeds:
        tensors["embed_tokens.weight"] = head.embedding.weight
    if len(head.scored) < config.vocab_size:
        among = torch.zeros(config.vocab_size, dtype=torch.bool)
        among[head.scored] = True
        tensors |= {"d2t": head.scored - torch.arange(len(head.scored)), "t2d": among}
    return tensors


def llama(config: Any, base: Base, width: int, kv_heads: int, size: int) -> dict[str, Any]:
    """The configuration of a head's one layer, as transformers writes a Llama's."""
    scaling = getattr(config, "scaling", None)
    return {
        **({"rope_scaling": dict(scaling)} if scaling else {}),
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width,
        "intermediate_size": config.inner, "num_attention_heads": config.heads,
        "num_key_value_heads": kv_heads, "head_dim": size, "num_hidden_layers": 1,
        "hidden_act": "silu", "rms_norm_eps": config.eps, "rope_theta": config.base,
        "attention_bias": config.bias, "max_position_embeddings": base.positions,
        "vocab_size": config.vocab_size, "tie_word_embeddings": False,
        "base_model_name_or_path": base.name,
    }  # fmt: skip


def queries_keys_values(joint: Any, sizes: list[int], layer: str) -> dict[str, Tensor]:
    """The three maps that a head keeps as one."""
    found: dict[str, Tensor] = {}
    for what in ("weight",) if joint.bias is None else ("weight", "bias"):
        parts = getattr(joint, what).split(sizes)
        found |= {f"{layer}self_attn.{n}_proj.{what}": p for n, p in zip("qkv", parts, strict=True)}
    return found


def written(to: Path, file: str, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A folder of both, whole or not at all."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise CheckpointError(
            f"a head was to be written as {to}.",
            "something is there already.",
            "name a new folder, or an empty one.",
        )
    partial = to.with_name(f".{to.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        save_file(tensors, partial / file, metadata={"format": "pt"})
        move(partial / file, partial / file)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, to)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"a head was to be written as {to}.",
            f"the folder cannot be written ({error}).",
            "free disk space, fix the permissions, or choose another folder.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is there where all went well
    return to


def copied(part: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU with memory of its own: safetensors refuses parts of one map.

    Its numbers are stored as those of the head were, which is read in float32.
    """
    part = part.detach().cpu()
    stored = part.to(dtype) if part.is_floating_point() else part
    return stored.clone(memory_format=torch.contiguous_format)


def inexpressible(kind: str, layout: str, why: str, do: str) -> ConfigError:
    """The layout has no words for this head, why, and what to do."""
    return ConfigError(
        f"a head of the kind {kind} was to be written in the layout {layout}.", f"{why}.", f"{do}."
    )


LAYOUTS: dict[str, Layout] = {
    "eagle": Layout(("eagle",), "EAGLE-1 and EAGLE-2, as their authors and vLLM load it", eagle),
    "medusa": Layout(
        ("medusa",), "Medusa, as its authors and vLLM load it", medusa, "medusa_lm_head.safetensors"
    ),
    "eagle3": Layout(("eagle3-wide",), "EAGLE-3 as its authors write it (midlayer)", eagle3),
    "speculators": Layout(("eagle3-wide",), "EAGLE-3 as a speculators directory", speculators),
}
