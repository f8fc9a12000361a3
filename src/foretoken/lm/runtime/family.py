"""What a configuration tells about a model: windows, heads, positions, and what cannot work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from foretoken.errors import CapabilityError, ConfigError

# Attention whose biases or windows follow the place in the cache instead of the position.
BY_PLACE = frozenset({"bloom", "mpt", "gpt_neo"})
MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "ff")
KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of one model that its cache, masks and positions depend on."""

    name: str
    layers: int
    windows: tuple[int | None, ...]  # per layer
    names: dict[str, int | None]  # layer type -> window; more than one: masks go by type
    fold: int  # query heads per key head
    hidden: int
    max_length: int | None
    switch: int | None  # longrope: from this position on all positions are scaled otherwise
    by_place: bool  # trees and ragged rows are impossible


def describe(model: Any) -> Family:
    """Read a model's configuration; CapabilityError for what cannot decode speculatively at all."""
    config = model.config.get_text_config(decoder=True)
    name = str(getattr(model.config, "model_type", type(model).__name__))
    refuse(model, name)
    layers = int(config.num_hidden_layers)
    types = layer_types(config, layers, name)
    window = getattr(config, "sliding_window", None)
    names = {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(types)}
    heads = int(getattr(config, "num_attention_heads", 1))
    shared = getattr(config, "num_key_value_heads", None) or heads
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        longest = getattr(config, "max_seq_len", None)
    return Family(
        name=name,
        layers=layers,
        windows=tuple(names[kind] for kind in types),
        names=names if len(set(names.values())) > 1 else {},
        fold=max(1, heads // int(shared)),
        hidden=int(config.hidden_size),
        max_length=stretched(config, int(longest)) if longest else None,
        switch=switch_of(config),
        by_place=name in BY_PLACE or bool(getattr(config, "alibi", False)),
    )


def stretched(config: Any, longest: int) -> int:
    """Tokens that positions reach where YaRN stretches them: published recipes leave
    `max_position_embeddings` as it was (arXiv 2309.00071).
    """
    rope = getattr(config, "rope_parameters", None) or {}
    before, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if rope.get("rope_type") != "yarn" or not before or not factor:
        return longest
    return max(longest, int(before * factor))


def refuse_encoder_decoder(config: Any, name: str) -> None:
    """Also told of a configuration alone: a decoder may be read from such a checkpoint."""
    if getattr(config, "is_encoder_decoder", False):
        raise CapabilityError(
            f"{name} is an encoder-decoder model.",
            "only decoder-only language models write with guesses here.",
            "use a causal language model, or plain transformers generate for this one.",
        )


def refuse(model: Any, name: str) -> None:
    """Models without a causal head, with a second sequence, or with a state that cannot go back."""
    refuse_encoder_decoder(model.config, name)
    if model.get_output_embeddings() is None or not model.can_generate():
        raise CapabilityError(
            f"{type(model).__name__} has no language-model head.",
            "a model is needed that gives logits of the next token.",
            "load it with AutoModelForCausalLM.",
        )
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or []
    recurrent = sorted({str(kind) for kind in kinds} & {"linear_attention", "mamba", "recurrent"})
    # a family with recurrent layers may have a model of none: its layers say more than its class
    attends = set(kinds) <= KNOWN_LAYERS and len(kinds) == getattr(config, "num_hidden_layers", -1)
    if recurrent or (getattr(model, "_is_stateful", False) and not attends):
        raise CapabilityError(
            f"{name} keeps recurrent state between tokens.",
            "rejected guesses must be taken back, and a recurrent state cannot go back.",
            "use a model whose layers are attention, or plain transformers generate for this one.",
        )


def layer_types(config: Any, layers: int, name: str) -> list[str]:
    """The kind of each layer; older configurations have a window for all layers or none."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) is not None
        return ["sliding_attention" if windowed else "full_attention"] * layers
    unknown = sorted(set(kinds) - KNOWN_LAYERS)
    if unknown:
        raise CapabilityError(
            f"{name} has layers of the kind {', '.join(unknown)}.",
            f"layers can be {' or '.join(sorted(KNOWN_LAYERS))} here.",
            "use a model whose layers are of these kinds, or plain transformers generate.",
        )
    return list(kinds)[:layers]


def switch_of(config: Any) -> int | None:
    """Where longrope scaling sets in, if it does."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for part in parts:
        if part.get("rope_type") == "longrope":
            at = part.get("original_max_position_embeddings")
            at = at or getattr(config, "original_max_position_embeddings", None)
            return int(at) if at else None
    return None


def decoder_of(model: Any) -> nn.Module:
    """The model below its output head; it ends with the last norm."""
    found: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    return found


def decoder_layers(model: Any, count: int) -> list[nn.Module]:
    """The modules whose outputs are the hidden layers; empty where they cannot be told."""
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return []


def sublayers(layer: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The attention and the MLP of a decoder layer; None where they are no modules of their own."""
    attention = [m for m in layer.children() if "Attention" in type(m).__name__]
    mlp = [m for name, m in layer.named_children() if name in MLP_NAMES]
    return (attention[0], mlp[0]) if len(attention) == 1 and len(mlp) == 1 else None


def attention_configs(model: Any) -> list[Any]:
    """Every configuration object in which the model's modules look up their attention."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The modules that caches, exits and the attention function of a loaded model are made for."""

    decoder: nn.Module
    layers: list[nn.Module]
    configs: list[Any]

    @classmethod
    def of(cls, model: Any, count: int) -> Structure:
        return cls(decoder_of(model), decoder_layers(model, count), attention_configs(model))

    def fits(self, model: Any) -> bool:
        """Whether the decoder has the same layers, which look attention up where they did.

        A copied layer does so in the configuration that was copied with it.
        """
        now = Structure.of(model, len(self.layers))
        before = [self.decoder, *self.layers, *self.configs]
        return list(map(id, (now.decoder, *now.layers, *now.configs))) == list(map(id, before))

    def check(self, model: Any) -> None:
        """ConfigError where it does not fit."""
        if not self.fits(model):
            raise ConfigError(
                "layers of a loaded model were replaced, moved or removed, or their attention was.",
                "what is loaded follows weights, hooks and the modules inside of layers; caches "
                "and exits are of the layers that were there.",
                "close what was loaded, and load the changed model.",
            )
