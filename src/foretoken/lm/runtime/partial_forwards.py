"""Running part of a model's layers: the others pass their input on, for the length of one forward.

Nothing is taken out of the model. A layer that is left out keeps its place, since families tell
windows and rotations by the place, and its `forward` is shadowed by one that returns what it was
given. So embeddings, norms, scalings, masks and the head stay the family's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foretoken.errors import CapabilityError
from foretoken.lm.runtime.captured import Call, Captured, Cut
from foretoken.lm.runtime.packing import Feed
from foretoken.types import Layer

Forward = Callable[..., Any]


class Part(Protocol):
    """One forward through part of a model."""

    def run(self, lean: Captured, call: Call) -> list[Tensor]:
        """What the call's taps read, then logits [B * P, V]: this part of a captured model."""
        ...

    @property
    def head(self) -> bool:
        """Whether logits are made."""
        ...

    def entered(
        self, stack: Stack, feeds: Sequence[Feed], width: int
    ) -> AbstractContextManager[None]:
        """Inside, the model runs this part only, on a batch of these feeds padded to `width`."""
        ...


@dataclass(slots=True, eq=False)
class Stage:
    """One forward through the layers from `start` to `stop`, instead of all.

    With a `start` above zero the feeds bring the outputs of the layer before it. Without a head
    the forward fills caches and taps, and makes no logits. With `exits`, one per feed, the head
    reads each row behind a layer of its own.
    """

    start: int
    stop: int
    head: bool = True
    states: dict[int, Tensor] | None = None  # slot -> [n, H] entering layer `start`
    exits: dict[int, int] | None = None  # slot -> layers before this row's head

    def run(self, lean: Captured, call: Call) -> list[Tensor]:
        """What the call's taps read, then logits [B * P, V], of width zero without a head."""
        feeds, width = call.batch.feeds, call.batch.width
        wanted, entering = self.leaving(feeds), None
        if self.start:
            entering = self.entering(feeds, width)
        if not self.head:
            *tapped, last = call.run(lean, Cut(self.start, self.stop, head=False), entering)
            return [*tapped, last.new_zeros(len(feeds) * call.batch.kept, 0)]
        if set(wanted) == {self.stop}:
            return call.run(lean, Cut(self.start, self.stop), entering)
        depths = sorted(set(wanted) - {self.stop})
        more = tuple(Layer(depth - 1) for depth in depths)
        cut = Cut(self.start, self.stop, head=False)
        *tapped, last = call.run(lean, cut, entering, more)
        left = dict(zip(depths, tapped[len(call.taps) :], strict=True)) | {self.stop: last}
        mixed = torch.stack([left[depth][row] for row, depth in enumerate(wanted)])
        [logits] = replace(call, taps=()).run(lean, Cut(lean.layers, lean.layers), mixed)
        return [*tapped[: len(call.taps)], logits]

    def entering(self, feeds: Sequence[Feed], width: int) -> Tensor:
        """[B, width, H] that enters the layer `start`."""
        given = [padded(self.states[feed.memory.slot], width) for feed in feeds]  # type: ignore[index]
        return torch.stack(given)

    def leaving(self, feeds: Sequence[Feed]) -> list[int]:
        """Layers before each row's head."""
        return [self.stop if self.exits is None else self.exits[f.memory.slot] for f in feeds]

    def entered(
        self, stack: Stack, feeds: Sequence[Feed], width: int
    ) -> AbstractContextManager[None]:
        """Inside, the model runs this part only, on a batch of these feeds."""
        return stack.shadowed(self.forwards(stack, feeds, width))

    def forwards(self, stack: Stack, feeds: Sequence[Feed], width: int) -> dict[int, Forward]:
        """Shadows of layers by index, for a batch of these feeds padded to `width`."""
        last = len(stack.layers)
        outside = (*range(self.start - 1), *range(self.stop, last))
        shadows = {i: stack.passing(i) for i in outside}
        if self.start:
            shadows[self.start - 1] = stack.giving(self.start - 1, self.entering(feeds, width))
        wanted = self.leaving(feeds)
        early = set(wanted) - {self.stop}
        if early:
            seen: dict[int, Tensor] = {}
            for i in early:
                shadows[i] = stack.noting(i, seen)
            shadows[self.stop] = stack.choosing(self.stop, wanted, seen)
        return shadows


class Stack:
    """The decoder layers of a model, and the shadows that can stand in for them."""

    def __init__(self, model: Any, layers: Sequence[nn.Module]) -> None:
        if not layers:
            raise CapabilityError(
                "part of a model's layers was asked for.",
                f"the decoder layers of {type(model).__name__} could not be found.",
                "use a method that needs no layers of its own: chain, prompt-lookup, plain.",
            )
        self.model, self.layers = model, tuple(layers)
        self.body = model.base_model  # without the head
        self.tuples = [length > 0 for length in returned_lengths(model, layers)]

    def passing(self, index: int) -> Forward:
        """Layer `index` returns its input."""
        return _first_in_tuple if self.tuples[index] else _first

    def giving(self, index: int, states: Tensor) -> Forward:
        """Layer `index` returns `states`, whatever it was given."""
        result = (states,) if self.tuples[index] else states
        return lambda *args, **kwargs: result

    def noting(self, index: int, seen: dict[int, Tensor]) -> Forward:
        """Layer `index` runs, and its input is kept in `seen`."""
        run = self.layers[index].forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            seen[index] = _first(*args, **kwargs)
            return run(*args, **kwargs)

        return forward

    def choosing(self, index: int, wanted: Sequence[int], seen: Mapping[int, Tensor]) -> Forward:
        """Layer `index` returns, for row i, what entered layer `wanted[i]`."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = {**seen, index: _first(*args, **kwargs)}
            here = inputs[index].device  # layers may be spread over several
            mixed = torch.stack([inputs[layer][row].to(here) for row, layer in enumerate(wanted)])
            return (mixed,) if self.tuples[index] else mixed

        return forward

    @contextmanager
    def shadowed(self, shadows: Mapping[int, Forward]) -> Iterator[None]:
        """These layers run these functions inside."""
        with replaced({self.layers[i]: forward for i, forward in shadows.items()}):
            yield

    def head(self) -> float:
        """What the head costs beside a layer: numbers read, a layer's being one."""
        head = self.model.get_output_embeddings().weight.numel()
        return float(head / max(sum(p.numel() for p in self.layers[0].parameters()), 1))

    def read_out(self, states: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, H] behind any layer: the model's own norm and head."""
        last = len(self.layers) - 1
        shadows = {i: self.passing(i) for i in range(last)}
        shadows[last] = self.giving(last, states[None])
        ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        with self.shadowed(shadows):
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits


@contextmanager
def replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Modules run other functions inside, and their own again outside."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


@torch.inference_mode()
def returned_lengths(model: Any, modules: Sequence[nn.Module]) -> list[int]:
    """How many things each module returns in a tuple, by one tiny forward; 0: a tensor alone."""
    found: dict[nn.Module, int] = {}

    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        found[module] = len(output) if isinstance(output, tuple) else 0

    hooks = [module.register_forward_hook(note) for module in modules]
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    idle = [i for i, module in enumerate(modules) if module not in found]
    if idle:
        raise CapabilityError(
            "part of a model's layers was asked for.",
            f"layer {idle[0]} of {type(model).__name__} did not run on a text, so it cannot be "
            "stopped at or left out.",
            "use a method that needs no layers of its own: chain, prompt-lookup, plain.",
        )
    return [found[module] for module in modules]


def padded(states: Tensor, width: int) -> Tensor:
    """[n, H] to [width, H] by repeating the last row, as ids are padded."""
    missing = width - len(states)
    return torch.cat([states, states[-1:].expand(missing, -1)]) if missing else states


def _first(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _first_in_tuple(*args: Any, **kwargs: Any) -> Any:
    return (_first(*args, **kwargs),)
