"""Hidden layers by forward hooks: the index of `output_hidden_states` differs between versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from foretoken.errors import CapabilityError
from foretoken.types import NORMED


@contextmanager
def tapping(
    layers: Sequence[nn.Module],
    decoder: nn.Module,
    taps: tuple[int, ...],
    last: int | None = None,
) -> Iterator[list[Tensor]]:
    """A list that holds the outputs of `layers[tap]`, in the order of `taps`, after the block.

    NORMED is what `decoder`, all layers and the last norm behind them, gives to the output head.
    `last` keeps that many places only, and lets the memory of the others go.
    """
    tapped: list[Tensor] = []
    if not taps:
        yield tapped
        return
    if not layers and set(taps) != {NORMED}:
        raise CapabilityError(
            "hidden layers were asked for.",
            "the decoder layers of this model could not be found.",
            "use a method that reads no hidden layers: chain, tree, prompt-lookup.",
        )
    seen: dict[int, Tensor] = {}
    indices = [tap if tap == NORMED else tap % len(layers) for tap in taps]
    hooks = [
        (decoder if i == NORMED else layers[i]).register_forward_hook(keep(seen, i, last))
        for i in set(indices)
    ]
    try:
        yield tapped
    finally:
        for hook in hooks:
            hook.remove()
    tapped += [seen[index] for index in indices]


def keep(seen: dict[int, Tensor], index: int, last: int | None = None) -> Any:
    """A hook that stores what a module gives; some return it first in a tuple or a record."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        states: Tensor = output if isinstance(output, Tensor) else output[0]
        seen[index] = states if last is None else states[:, -last:].clone()

    return hook
