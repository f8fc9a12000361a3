"""Fingerprints of weights: a cheap look that tells which of them were replaced or written to.

Neither a copy of a weight nor a captured CUDA graph follows `weight.data = new` or
`weight.data += delta`, and no version count tells of them. So a fingerprint holds what is cheap to
compare: which tensor it is, where it lies, its version, and a few of its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

# Elements compared per weight. A merged adapter or an optimizer step moves nearly all of them; a
# write through `.data` into a few rows may miss them, which is what the full look is for. Each is
# a cache miss: 32 of each of 200 weights of 1600 x 1600 took 0.55 ms, so 16 are about half of that.
SAMPLED = 16
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """What a weight was at the last look. The old memory is kept: no other takes its address."""

    __slots__ = ("counted", "place", "plain", "samples", "seen", "version", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.plain = has_numbers(weight)
        self.place = place_of(weight) if self.plain else ()
        self.counted = not weight.is_inference()  # inference tensors count no changes
        self.version = weight._version if self.counted else 0
        self.samples: Any = None
        if self.plain and weight.device.type == "cpu":
            sampled = spread(weight, SAMPLED)
            size = sampled.element_size()
            if size in SAME_SIZE:  # as integers: NumPy has no bfloat16, and a NaN equals itself
                self.samples = sampled.view(SAME_SIZE[size]).numpy()
        self.seen = self.numbers()

    def numbers(self) -> bytes:
        return b"" if self.samples is None else self.samples.tobytes()

    def moved(self, weight: Tensor) -> bool:
        """Whether this is another tensor by now, or lies elsewhere."""
        return weight is not self.weight or (self.plain and place_of(weight) != self.place)

    def written(self) -> bool:
        """Whether its numbers were changed where they lie."""
        if self.counted and self.weight._version != self.version:
            return True
        return self.samples is not None and self.samples.tobytes() != self.seen


@dataclass(frozen=True, slots=True)
class Changes:
    """What was found between two looks at a model."""

    modules: dict[int, nn.Module]  # with changed parameters, by id
    weights: int  # parameters that were replaced or written to
    moved: bool  # whether any tensor is another one, or lies elsewhere
    buffers: bool  # whether one was written to where it lies


class WeightWatch:
    """The fingerprints of all parameters and buffers of a model, from one look to the next."""

    def __init__(self, model: nn.Module) -> None:
        self.marks = {key: Fingerprint(weight) for key, _, weight in owned(model)}

    def look(self, model: nn.Module) -> Changes:
        """What has changed since the last look. A model may write to its buffers by itself."""
        changed: dict[int, nn.Module] = {}
        weights: set[int] = set()
        moved, buffers, count = False, False, 0
        for key, module, weight in owned(model):
            count += 1
            mark = self.marks.get(key)
            elsewhere = mark is None or mark.moved(weight)
            moved |= elsewhere
            if elsewhere or (mark is not None and mark.written()):
                if isinstance(weight, nn.Parameter):
                    changed[id(module)] = module
                    weights.add(id(weight))
                else:
                    buffers |= not elsewhere
                    self.marks[key] = Fingerprint(weight)
        return Changes(changed, len(weights), moved or count != len(self.marks), buffers)

    def renew(self, model: nn.Module) -> None:
        """Take what is there now as seen."""
        kept = {}
        for key, _, weight in owned(model):
            mark = self.marks.get(key)
            same = mark is not None and not mark.moved(weight) and not mark.written()
            kept[key] = mark if same and mark is not None else Fingerprint(weight)
        self.marks = kept


def states(module: nn.Module) -> tuple[Any, ...]:
    """What the parameters of a module are now: equal between looks if nothing was changed."""
    weights = [weight for weight in module._parameters.values() if weight is not None]
    found = [Fingerprint(weight) for weight in weights]
    return tuple((id(m.weight), m.place, m.version, m.seen) for m in found)


def tied(model: nn.Module) -> set[frozenset[tuple[int, str]]]:
    """The places of each parameter that is in several: of embeddings and the output layer, say."""
    places: dict[int, set[tuple[int, str]]] = {}
    for key, _, weight in owned(model):
        places.setdefault(id(weight), set()).add(key)
    return {frozenset(one) for one in places.values() if len(one) > 1}


def owned(model: nn.Module) -> Iterator[tuple[tuple[int, str], nn.Module, Tensor]]:
    """Every parameter and buffer under its module and name; a tied one under each of its owners.

    Walked here and not by `modules()`, which makes a name for each and takes three times as long.
    """
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        owner = id(module)
        if owner in seen:
            continue
        seen.add(owner)
        waiting += [child for child in module._modules.values() if child is not None]
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield (owner, name), module, tensor


def place_of(weight: Tensor) -> tuple[Any, ...]:
    """Memory, type and layout of a plain tensor."""
    return weight.data_ptr(), weight.dtype, weight.shape, weight.stride()


def has_numbers(weight: Tensor) -> bool:
    """Whether this is a plain tensor over memory of its own: no wrapper, not on the meta device."""
    plain = type(weight) is nn.Parameter or type(weight) is Tensor
    return plain and weight.layout is torch.strided and weight.device.type != "meta"


def spread(weight: Tensor, count: int) -> Tensor:
    """A view of at most `count` elements over all of a weight, in changing columns."""
    pairs = zip(weight.shape, weight.stride(), strict=True)
    extent = 0 if weight.numel() == 0 else 1 + sum((size - 1) * step for size, step in pairs)
    step = max(1, extent // count)
    width = weight.shape[-1] if weight.ndim else 1
    while step > 1 and gcd(step, width) > 1:  # else every sample may lie in the same column
        step -= 1
    taken = min(count, -(-extent // step))
    return weight.detach().as_strided((taken,), (step,), weight.storage_offset())
