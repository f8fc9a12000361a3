"""One layer of the slot cache as others read it: keys and values, and how they are rotated.

Rotations are the model's own: its module of frequencies, with any scaling, and the function its
attention calls. Whether a layer rotates at all is seen from its keys at two places: a text that is
moved has its first keys, rotated further, and nothing else.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from foretoken.errors import CapabilityError
from foretoken.lm.runtime.family import decoder_layers, decoder_of
from foretoken.lm.runtime.rounding import allowed
from foretoken.types import DecodeState

TOKENS, MOVED = 5, 11  # of the text that is tried, and by how much it is moved
# What a function raises that was written for other shapes.
RAISED = (ValueError, RuntimeError, TypeError, AttributeError, KeyError, IndexError)


class Owner(Protocol):
    """A model with the slot cache that its rows lie in."""

    model: Any
    layers: int
    lock: Any

    def columns(self, row: DecodeState, layer: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of a row's cached tokens; None before the first forward."""
        ...


class SlotLayerCache:
    """The LayerCache protocol over a layer of a CachedLM."""

    def __init__(self, owner: Owner, layer: int) -> None:
        self.owner, self.layer = owner, layer
        model = owner.model
        with owner.lock, torch.inference_mode(), same_input(model, layer, owner.layers):
            here, values = own_keys_values(model, layer, 0)
            there, _ = own_keys_values(model, layer, MOVED)
        self.heads, self.size = here.shape[1:]
        if values.shape != here.shape:
            raise unreadable(model, layer, "its keys and values are of different sizes")
        self.nothing = here.new_zeros(self.heads, 0, self.size)
        self.rotation = Rotation.of(model, layer, owner.layers)
        self.rotary = self.rotation is not None and self.found_rotated(here, there)

    def found_rotated(self, here: Tensor, there: Tensor) -> bool:
        """Whether keys of a moved text are those of the text, rotated further; False: the same."""
        assert self.rotation is not None
        model = self.owner.model
        by = torch.full((len(here),), MOVED, device=here.device)
        try:
            unit = self.rotation(torch.ones_like(here[:1]), by[:1] - MOVED)  # some scale as well
            moved = self.rotation(here, by) / unit
        except RAISED as error:
            said = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise unreadable(model, self.layer, f"its rotation cannot be called ({said})") from None
        off = {
            rotated: float((keys.float() - there.float()).square().mean().sqrt())
            for rotated, keys in ((True, moved), (False, here))
        }
        nearest = min(off, key=lambda rotated: off[rotated])
        if not off[nearest] <= allowed(here.dtype) * float(there.float().std()):  # nor NaN
            raise unreadable(model, self.layer, "its keys are not those of its rotation")
        return nearest

    def keys_values(
        self, row: DecodeState
    ) -> tuple[Float[Tensor, "heads S size"], Float[Tensor, "heads S size"]]:
        """Views of the cache."""
        found = self.owner.columns(row, self.layer)
        return (self.nothing, self.nothing) if found is None else found

    def rotated(
        self, states: Float[Tensor, "n any size"], positions: Int[Tensor, "n"]
    ) -> Float[Tensor, "n any size"]:
        """By the model's own function."""
        if not self.rotary or self.rotation is None:
            return states
        with self.owner.lock:  # some scalings follow the longest text that was asked for
            return self.rotation(states, positions)


class Rotation:
    """A model's frequencies and the function that its attention rotates with."""

    def __init__(self, frequencies: nn.Module, apply: Any, kind: str | None, part: int) -> None:
        self.frequencies, self.apply, self.part = frequencies, apply, part
        named = "layer_type" in inspect.signature(frequencies.forward).parameters
        self.kind = {"layer_type": kind} if named else {}

    @classmethod
    def of(cls, model: Any, layer: int, layers: int) -> Rotation | None:
        """Of one layer; None for a model without rotary positions."""
        frequencies = getattr(decoder_of(model), "rotary_emb", None)
        modules = decoder_layers(model, layers)
        attention = [
            module for module in (modules[layer].modules() if modules else ())
            if "Attention" in type(module).__name__
        ]  # fmt: skip
        source = sys.modules[type(attention[0] if attention else model).__module__]
        apply = getattr(source, "apply_rotary_pos_emb", None)
        if frequencies is None and apply is None:
            return None
        if frequencies is None or apply is None or not attention:
            raise unreadable(model, layer, "how it rotates them cannot be told")
        kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
        part = getattr(attention[0], "rotary_ndims", 0)  # some cut queries before they rotate them
        return cls(frequencies, apply, kinds[layer] if kinds else None, part)

    def __call__(
        self, states: Float[Tensor, "n any size"], positions: Int[Tensor, "n"]
    ) -> Float[Tensor, "n any size"]:
        """States at these positions."""
        cos, sin = self.frequencies(states, positions[None], **self.kind)
        whole = states.transpose(0, 1)[None]
        turned = whole[..., : self.part] if self.part else whole
        turned = self.apply(turned, turned, cos, sin)[0]
        if self.part:
            turned = torch.cat([turned, whole[..., self.part :]], -1)
        found: Tensor = turned[0].transpose(0, 1)
        return found


class SameInput:
    """A hook before a layer: what enters it first enters it each time."""

    def __init__(self) -> None:
        self.states: Any = None

    def __call__(self, _: nn.Module, args: Any, named: Any) -> tuple[Any, Any] | None:
        if self.states is None:
            self.states = args[0] if args else named.get("hidden_states")
            return None
        if args:
            return (self.states, *args[1:]), named
        return args, {**named, "hidden_states": self.states}


@contextmanager
def same_input(model: Any, layer: int, layers: int) -> Iterator[None]:
    """Whatever the model reads meanwhile, the layer reads the first of it: texts at other positions
    differ by rounding, which thirty layers in bfloat16 make as large as a rotation.
    """
    modules = decoder_layers(model, layers)
    if not modules:
        yield
        return
    hook = modules[layer].register_forward_pre_hook(SameInput(), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def own_keys_values(
    model: Any, layer: int, first: int
) -> tuple[Float[Tensor, "n heads size"], Float[Tensor, "n heads size"]]:
    """What a layer keeps of a short text that begins at position `first`."""
    ids = torch.arange(1, TOKENS + 1, device=model.device)[None]
    ids = ids % model.get_input_embeddings().weight.shape[0]
    cache = DynamicCache()
    options: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = torch.arange(first, first + TOKENS, device=model.device)[None]
    model(input_ids=ids, **options)
    kept: Any = cache.layers[layer] if layer < len(cache.layers) else None
    if kept is None or kept.keys is None or kept.keys.dim() != 4:
        raise unreadable(model, layer, "it keeps none of its own")
    return kept.keys[0].transpose(0, 1), kept.values[0].transpose(0, 1)


def unreadable(model: Any, layer: int, why: str) -> CapabilityError:
    """A layer's cache cannot be read by others, and why."""
    return CapabilityError(
        f"the keys and values of layer {layer} of {model.config.model_type} were asked for.",
        f"they cannot be read: {why}.",
        "use a head that reads hidden states instead: eagle3, eagle, medusa.",
    )
