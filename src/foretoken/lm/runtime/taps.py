"""Hidden layers by forward hooks: the index of `output_hidden_states` differs between versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from foretoken.errors import CapabilityError
from foretoken.types import FinalNorm, Layer, Tap, Taps


@contextmanager
def tapping(layers: Sequence[nn.Module], decoder: nn.Module, taps: Taps) -> Iterator[list[Tensor]]:
    """A list that holds the outputs of `layers[tap]`, in the order of `taps`, after the block.

    FinalNorm is what `decoder`, all layers and the last norm behind them, gives to the output head.
    """
    tapped: list[Tensor] = []
    if not layers and any(isinstance(tap, Layer) for tap in taps):
        raise CapabilityError(
            "hidden layers were asked for.",
            "the decoder layers of this model could not be found.",
            "use a method that reads no hidden layers: chain, tree, prompt-lookup.",
        )
    seen: dict[nn.Module, Tensor] = {}
    modules = [tapped_module(layers, decoder, tap) for tap in taps]
    hooks = [module.register_forward_hook(keep(seen)) for module in set(modules)]
    try:
        yield tapped
    finally:
        for hook in hooks:
            hook.remove()
    if any(seen[module].dim() > 3 for module in modules):
        raise CapabilityError(
            "hidden layers were asked for.",
            "the layers of this model hand on several states of each token, not one.",
            "use a method that reads the last states only, medusa or hydra, or none: chain, tree, "
            "prompt-lookup.",
        )
    tapped += [seen[module] for module in modules]


def tapped_module(layers: Sequence[nn.Module], decoder: nn.Module, tap: Tap) -> nn.Module:
    """The module whose output a tap reads."""
    if isinstance(tap, Layer):
        return layers[tap.index]
    if isinstance(tap, FinalNorm):
        return decoder
    embeddings: nn.Module = decoder.get_input_embeddings()  # type: ignore[operator]
    return embeddings


def keep(seen: dict[nn.Module, Tensor]) -> Any:
    """A hook that stores what a module gives; some return it first in a tuple or a record."""

    def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
        seen[module] = output if isinstance(output, Tensor) else output[0]

    return hook
