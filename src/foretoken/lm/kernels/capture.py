"""A model's forward captured once as a graph (`torch.export`), with its attention left open.

The unmodified model is traced with symbolic rows, tokens and places of logits. Where its layers
call attention, the graph has one node that names the layer: cache, masks and the ragged lengths of
rows stay outside, so one graph serves every context and every batch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from foretoken.errors import CapabilityError
from foretoken.lm.kernels.seams import hooked, values
from foretoken.lm.runtime.attention import Switch
from foretoken.lm.runtime.cache import SlotCache
from foretoken.lm.runtime.captured import Sublayer
from foretoken.lm.runtime.family import Family, attention_configs, sublayers
from foretoken.lm.runtime.taps import keep, tapped_module
from foretoken.types import Embedding, FinalNorm, Layer, Tap

NAME = "foretoken-capture"
Mark = Tap | Sublayer  # what gave a hidden state
KEPT = 32  # traced structures
EXAMPLE = 2, 3, 2  # rows, tokens and places of what is traced; all three become symbols
IDS, POSITIONS, PLACES = range(3)  # inputs
# What tracing raises for control flow on numbers, or for code it cannot follow.
UNTRACEABLE = (
    RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError,
    NotImplementedError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer, found by its owner: another tensor may take its name."""

    owner: nn.Module
    name: str

    def now(self) -> Tensor:
        """The tensor as it is."""
        found: Tensor = getattr(self.owner, self.name)
        if type(found) in (nn.Parameter, Tensor):
            return found.detach()
        with torch.inference_mode(False):  # wrappers of quantised numbers keep versions
            return found.detach()


@dataclass(slots=True, eq=False)
class Capture:
    """The graph, and what its nodes stand for."""

    root: nn.Module  # the model
    graph: fx.Graph
    weights: dict[fx.Node, Weight]
    constants: dict[fx.Node, Tensor]  # made by the model's code, the same in every call
    inputs: tuple[fx.Node, ...]  # IDS [B, Q] of tokens, POSITIONS [B, Q], PLACES [P] of logits
    marks: tuple[Mark, ...]

    @property
    def logits(self) -> fx.Node:
        """[B, P, V]."""
        found: fx.Node = self.returned()[0]
        return found

    @property
    def states(self) -> dict[Mark, fx.Node]:
        """Hidden states by what gave them, [B, Q, H]."""
        return dict(zip(self.marks, self.returned()[1:], strict=True))

    def returned(self) -> Any:
        """The graph's results, as rewriting has left them."""
        return next(iter(reversed(self.graph.nodes))).args[0]


@torch.library.custom_op("foretoken::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Stands in graphs for attention of one layer over its cache: [B, Q, H, D of values]."""
    raise NotImplementedError("a node of captured graphs, never run")


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[3])


class PassingCache(SlotCache):
    """Gives keys and values back as they come, and notes whose they are."""

    layer: int | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.layer = layer_idx
        return key_states, value_states


class Traced(nn.Module):
    """The model as a function of token ids, positions and places; outputs and all tapped states."""

    def __init__(
        self, model: nn.Module, family: Family, layers: Sequence[nn.Module], decoder: nn.Module
    ) -> None:
        super().__init__()
        self.model, self.family = model, family
        taps: list[Tap] = [Embedding(), *(Layer(i) for i in range(len(layers))), FinalNorm()]
        marked: dict[Mark, nn.Module] = {tap: tapped_module(layers, decoder, tap) for tap in taps}
        for i, layer in enumerate(layers):
            parts = sublayers(layer) or ()
            marked |= {Sublayer(i, kind): part for kind, part in enumerate(parts)}
        self.marks = tuple(marked)
        self.marked = tuple(marked.values())

    def forward(self, ids: Tensor, positions: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        cache = PassingCache(self.family.layers)
        nothing = torch.zeros(1, 1, 1, 1, device=ids.device)
        names = self.family.names
        seen: dict[nn.Module, Tensor] = {}
        hooks = [module.register_forward_hook(keep(seen)) for module in self.marked]
        try:
            with attending(cache):
                output = self.model(
                    input_ids=ids,
                    position_ids=positions,
                    attention_mask=dict.fromkeys(names, nothing) if names else nothing,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=places,
                )
        finally:
            for hook in hooks:
                hook.remove()
        return output.logits, *(seen[module] for module in self.marked)


class attending:
    """Inside, attention of any layer becomes a node, with the layer that `cache` saw last."""

    cache: PassingCache | None = None

    def __init__(self, cache: PassingCache) -> None:
        self.mine = cache

    def __enter__(self) -> None:
        attending.cache = self.mine

    def __exit__(self, *_: object) -> None:
        attending.cache = None


def attend_later(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of a traced model."""
    assert attending.cache is not None and attending.cache.layer is not None
    layer = attending.cache.layer
    return attention(query, key, value, layer, scaling, softcap, s_aux), None


AttentionInterface.register(NAME, attend_later)
AttentionMaskInterface.register(NAME, eager_mask)


def capture(
    model: Any, family: Family, layers: Sequence[nn.Module], decoder: nn.Module, ragged: bool
) -> Capture:
    """Trace `model`; CapabilityError with the reason where its code cannot be followed.

    Models of equal structure share one tracing, whatever their weights are.
    """
    if not layers:
        raise refusal(family, "its decoder layers could not be found")
    if (name := hooked(model)) is not None:
        raise refusal(family, f"{name} has a hook or a forward of its own, whose values may change")
    key = structure(model, ragged)
    with _lock:
        outline = _outlines.get(key)
    if outline is None:
        outline = trace(Traced(model, family, layers, decoder), ragged)
        with _lock:
            if len(_outlines) >= KEPT:
                del _outlines[next(iter(_outlines))]
            _outlines[key] = outline
    return outline.of(model)


def structure(model: Any, ragged: bool) -> Any:
    """What the graph of a model without hooks depends on."""
    found: list[Any] = [ragged, model.dtype, model.device, model.config.to_json_string()]
    for name, module in model.named_modules():
        found.append((name, type(module), getattr(type(module), "forward", None), values(module)))
        for tensors in (module._parameters, module._buffers):
            found += [(n, type(t), t.shape, t.dtype) for n, t in tensors.items() if t is not None]
    owned = [id(tensor) for tensor in model.parameters(recurse=True)]
    return *found, len(owned)


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A traced graph without the model it came from."""

    graph: fx.Graph
    weights: dict[str, str]  # placeholder -> name of a parameter or buffer
    constants: dict[str, Tensor]
    marks: tuple[Mark, ...]

    def of(self, model: nn.Module) -> Capture:
        """A graph to be rewritten, over the weights of `model`."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(self.graph, copied))
        modules = dict(model.named_modules(remove_duplicate=False))  # one may be in two places
        weights: dict[fx.Node, Weight] = {}
        constants: dict[fx.Node, Tensor] = {}
        inputs = []
        for node in graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in self.weights:
                owner, _, name = self.weights[node.name].rpartition(".")
                weights[node] = Weight(modules[owner], name)
            elif node.name in self.constants:
                constants[node] = self.constants[node.name]
            else:
                inputs.append(node)
        return Capture(model, graph, weights, constants, tuple(inputs), self.marks)


_outlines: dict[Any, Outline] = {}
_lock = threading.Lock()


def trace(traced: Traced, ragged: bool) -> Outline:
    """Export the forward with rows, tokens and places as symbols."""
    model, family = traced.model, traced.family
    device = next(model.parameters()).device
    several, length, wanted = EXAMPLE
    rows = several if ragged else 1
    ids = torch.ones(rows, length, dtype=torch.long, device=device)
    positions = torch.arange(length, device=device).repeat(rows, 1)
    places = torch.arange(1, 1 + wanted, device=device)
    tokens = torch.export.Dim("tokens", min=1, max=1 << 20)
    sizes: dict[int, Any] = {1: tokens}
    if ragged:
        sizes[0] = torch.export.Dim("rows", min=1, max=1 << 16)
    shapes = (sizes, sizes, {0: torch.export.Dim("places", min=1, max=1 << 20)})
    switch = Switch(attention_configs(model))
    try:
        with torch.inference_mode(False), torch.no_grad(), switch.to(NAME):
            program = torch.export.export(
                traced, (ids, positions, places), dynamic_shapes=shapes, strict=False
            )
    except UNTRACEABLE as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise refusal(family, (lines or [type(error).__name__])[0][:160]) from error
    signature, graph = program.graph_signature, program.graph_module.graph
    if signature.buffers_to_mutate or getattr(signature, "user_inputs_to_mutate", None):
        raise refusal(family, "it writes into its own buffers")
    if any(node.op == "get_attr" for node in graph.nodes):
        raise refusal(family, "it runs part of itself as a graph of its own")
    asked = sum(node.target is torch.ops.foretoken.attention.default for node in graph.nodes)
    if asked != family.layers:
        raise refusal(family, f"{asked} of its {family.layers} layers ask for attention by name")
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted = signature.inputs_to_lifted_tensor_constants
    return Outline(
        graph,
        {node: name.removeprefix("model.") for node, name in named.items()},
        {node: program.constants[name] for node, name in lifted.items()},
        traced.marks,
    )


def refusal(family: Family, why: str) -> CapabilityError:
    return CapabilityError(
        f"the forward of {family.name} was to be captured.",
        f"{why}.",
        "nothing is lost but speed: its own forward is called as it is.",
    )
