"""What a model takes in memory, from its configuration alone: no weight is read.

The modules are made without numbers (torch's meta device), so that every parameter is counted as
it will be, tied ones once; one token is run through them and our own slot cache, which tells what
a column of the cache takes, whatever the family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foretoken import shipped
from foretoken.errors import CapabilityError
from foretoken.lm.kernels.linears import can_pack
from foretoken.lm.load import find_device, find_dtype, quiet
from foretoken.lm.runtime.attention import MOST_FOLDED
from foretoken.lm.runtime.cache import SlotCache
from foretoken.lm.runtime.cached import CHUNK, NARROW
from foretoken.lm.runtime.family import describe
from foretoken.lm.runtime.slot_attention import in_c
from foretoken.lm.unreadable import of_images, reads_images

# What model code raises that looks at numbers while it is built or run.
RAISED = (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, KeyError)
LAWS = 1 << 18  # numbers of laws that are computed together (`warp.ALL_AT_ONCE`)
TABLE = 2  # cosines and sines of every position (`kernels.position_tables`)
MADE_DENSE = ("mxfp4", "fp8")  # by loaders, on devices that cannot multiply them
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")  # by family


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of one model, in bytes where nothing else is said."""

    name: str
    layers: int
    hidden: int  # numbers
    vocab: int  # logits of a token
    inner: int  # numbers: the widest output of a layer's products
    fold: int  # query heads per key head
    heads: int  # that ask
    head: int  # numbers of a head's keys
    element: int  # bytes of a number
    weights: int  # every parameter and buffer, tied ones once
    copies: int  # second copies that kernels may keep, all of them
    scored: bool  # attention by hand, with scores of all columns (soft caps, sinks)
    in_c: bool  # attention over rows where they lie: no masks, no scores
    column: int  # keys and values of one token in all layers
    max_length: int | None
    spread: int = 0  # numbers of a token while it goes through its experts; 0: there are none

    def logits(self, tokens: int) -> int:
        """Of so many nodes, as the model gives them."""
        return tokens * self.vocab * self.element

    def states(self, tokens: int, taps: int) -> int:
        """Tapped hidden states."""
        return tokens * taps * self.hidden * self.element

    def mask(self, rows: int, nodes: int, columns: int) -> int:
        """Additive mask of trees of several rows; `nodes` with the root, query heads folded."""
        asked = max(nodes, min(self.fold * nodes, MOST_FOLDED))
        return rows * asked * columns * self.element

    def prompt_mask(self, rows: int, context: int, columns: int) -> int:
        """Of a chunk of prompts, while it is being made."""
        return 0 if self.in_c else 2 * self.chunk(rows, context) * columns * self.element

    def chunk(self, rows: int, context: int) -> int:
        """Tokens of prompts that are fed in one forward."""
        return min(rows * context, max(CHUNK, rows * NARROW))

    def activations(self, tokens: int) -> int:
        """What one layer holds at once: gate, up, their product, the stream and what joins it."""
        return tokens * (self.widest + 3 * self.hidden) * self.element

    def lent(self, tokens: int) -> int:
        """What lies idle beside that where memory is lent (`native.scratch`): the block that
        queries, keys and values had together, or as much as it is wider than the MLP's."""
        asked = self.head * (self.heads + 2 * (self.heads // self.fold))
        idle = asked if asked < self.inner else asked - self.inner
        return tokens * idle * self.element

    def fresh(self, tokens: int) -> int:
        """Likewise of the modules themselves, whose stream is kept from one layer to the next."""
        return tokens * (self.widest + 5 * self.hidden) * self.element

    @property
    def widest(self) -> int:
        """Numbers of a token in the widest part of a layer, its MLP or its experts."""
        return max(3 * self.inner, self.spread)

    def scores(self, rows: int, width: int, columns: int) -> int:
        """Of one layer: as they are, masked and as shares; nothing where one kernel does it all."""
        return 3 * rows * self.heads * width * columns * 4 if self.scored else 0

    def fresh_scores(self, tokens: int) -> int:
        """Of a text without cache, with a mask of full layers and one of windowed ones."""
        masks = 2 * tokens * tokens * self.element if self.scored else 0
        return self.scores(1, tokens, tokens) + masks

    def attention(self, rows: int, width: int, columns: int) -> int:
        """Keys and values repeated for every query head of one layer, where many tokens ask."""
        if self.in_c or self.fold == 1 or self.fold * width <= MOST_FOLDED:
            return 0
        return rows * columns * (self.column // self.layers) * self.fold

    def prompt_attention(self, rows: int, context: int, columns: int) -> int:
        """Likewise of as many prompts as are fed together so that each brings many tokens."""
        most = max(min(rows, self.fold * CHUNK // MOST_FOLDED), 1)
        widths = {count: self.chunk(count, context) // count for count in range(1, most + 1)}
        return max(self.attention(count, width, columns) for count, width in widths.items())

    def tables(self, positions: int) -> int:
        """Rotations of all positions up to twice as many."""
        return TABLE * 2 * max(positions, 512) * self.head * self.element

    def of_type(self, dtype: torch.dtype) -> Footprint:
        """The same in another type, weights aside: what a token takes."""
        column = self.column * dtype.itemsize // self.element
        return replace(self, element=dtype.itemsize, column=column)

    def with_outputs(self, rows: int) -> Footprint:
        """The same with only so many rows of the output layer, in a layer of their own."""
        own = rows * self.hidden * self.element
        whole = self.vocab * self.hidden * self.element
        copies = self.copies - whole + own if self.copies else 0
        return replace(self, vocab=rows, weights=self.weights + own, copies=copies)


def footprint(config: Any, dtype: Any = None, device: Any = None, source: Any = None) -> Footprint:
    """Of the model that this configuration makes, as `load_model` would load it from `source`.

    That of a model that is loaded is made by its own class: not every kind has one for text alone.
    """
    loaded = isinstance(source, PreTrainedModel)
    if not loaded and reads_images(config):
        raise of_images(source or config.name_or_path or "this", config)
    place = find_device(device)
    kind = find_dtype(dtype, place)
    if kind == "auto":
        kind = getattr(config, "dtype", None) or torch.float32
    auto: Any = AutoModelForCausalLM
    own: Any = type(source)
    build = own._from_config if loaded else auto.from_config
    try:
        with quiet(), torch.device("meta"):
            model = build(config, dtype=kind)
    except RAISED as error:
        raise unplannable(config, error) from error
    return of_modules(model.eval(), place, kind)


def of_modules(model: Any, place: torch.device, kind: torch.dtype) -> Footprint:
    """Of modules on the meta device that would be at `place`."""
    family = describe(model)
    config = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    packed = place.type == "cpu" and can_pack(kind)
    linear = [module for module in model.modules() if type(module) in (nn.Linear, Conv1D)]
    heads = int(getattr(config, "num_attention_heads", 1))
    weights, copies = weight_bytes(model), sum(module.weight.nbytes for module in linear)
    head_width = int(getattr(config, "head_dim", None) or family.hidden // heads)
    scored = by_hand(model, config)
    widest = [module.weight.numel() // input_width(module) for module in linear
              if module is not head]  # fmt: skip
    return Footprint(
        name=family.name,
        layers=family.layers,
        hidden=family.hidden,
        vocab=int(head.weight.shape[0]),
        inner=max(widest, default=family.hidden),
        fold=family.fold,
        heads=heads,
        head=head_width,
        element=kind.itemsize,
        weights=weights,
        copies=copies if packed else 0,
        scored=scored,
        in_c=not scored
        and place.type == "cpu"
        and not any(window is not None for window in family.windows)
        and in_c(kind, head_width) is not None,
        column=column_numbers(model.to(torch.bfloat16), family.layers) * kind.itemsize,
        max_length=family.max_length,
        spread=expert_numbers(model, config, family.hidden),
    )


def as_held(planned: Footprint, source: Any, config: Any) -> Footprint:
    """With the bytes that weights of this source really have: of a loaded model its own, of a
    quantised one those of its files. Weights whose files are not here, or that are made dense where
    a device cannot multiply them, are counted as dense ones.
    """
    if isinstance(source, nn.Module):
        linear: list[Any] = [one for one in source.modules() if type(one) in (nn.Linear, Conv1D)]
        copies = sum(module.weight.nbytes for module in linear) if planned.copies else 0
        return replace(planned, weights=weight_bytes(source), copies=copies)
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return planned
    folder = Path(str(shipped.resolve(source))).expanduser()
    files = [file.stat().st_size for file in folder.glob("*.safetensors")]
    how = quantised if isinstance(quantised, dict) else vars(quantised)
    if not files or str(how.get("quant_method")).rpartition(".")[2].lower() in MADE_DENSE:
        return planned
    # the output layer is left as it is by most; other layers have no copies in a type of ours
    copies = planned.vocab * planned.hidden * planned.element if planned.copies else 0
    return replace(planned, weights=sum(files), copies=copies)


def expert_numbers(model: nn.Module, config: Any, hidden: int) -> int:
    """Numbers that a token takes in a layer of experts, whose weights are stacked [E, out, in]:
    its state for each expert chosen, what enters and leaves their gates, and what they say.
    """
    chosen = max((int(getattr(config, name, None) or 0) for name in CHOSEN), default=0)
    inner = 0
    for module in model.modules():
        stacked = [one.shape for one in module.parameters(recurse=False) if one.dim() == 3]
        inner = max(inner, sum(shape[1] * shape[2] // hidden for shape in stacked))
    if not (chosen and inner):
        return 0
    # of gate, up and down, a third each: gate and up, what the gate lets through, their product
    return chosen * max(hidden + 4 * inner // 3, 4 * hidden)


def by_hand(model: Any, config: Any) -> bool:
    """Whether attention has soft caps or sinks, for which no fused kernel has an argument."""
    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    return sinks or getattr(config, "attn_logit_softcapping", None) is not None


def input_width(module: Any) -> int:
    """Numbers that a linear layer reads."""
    weight = module.weight
    return int(weight.shape[0] if type(module) is Conv1D else weight.shape[1])


def weight_bytes(model: nn.Module) -> int:
    """Parameters and buffers, each once however many modules have it."""
    found = {id(one): one.nbytes for one in (*model.parameters(), *model.buffers())}
    return sum(found.values())


def column_numbers(model: Any, layers: int) -> int:
    """Keys and values of one token, as our cache keeps them of a forward over one token.

    In bfloat16, which products of experts want where nothing is computed.
    """
    cache = SlotCache(layers, slots=1, columns=1)
    device = next(model.parameters()).device
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    cache.reserve([0], [1])
    cache.aim([0], [0], 1, 1, {}, device)
    try:
        with quiet(), torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    except RAISED as error:
        raise unplannable(model.config, error) from error
    return sum(group.keys.numel() + group.values.numel() for group in cache.groups)


def unplannable(config: Any, error: Exception) -> CapabilityError:
    said = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return CapabilityError(
        f"the memory of a {config.model_type} was to be planned from its configuration.",
        f"its modules cannot be made without weights: {said}.",
        "load it without memory_budget, and read its memory while it runs.",
    )
