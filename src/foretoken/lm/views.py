"""Views of a language model: the same weights and cache, used in part.

Self-speculation drafts with part of its own target, so nothing is loaded twice. What a view offers
is told here; `lm.exits` and `lm.skips` make views of transformers models, `lm.table_views` of
tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor

from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.leaving import Leave
from foretoken.lm.shadow import Shadow
from foretoken.types import DecodeState, LanguageModel


class Exits(Protocol):
    """A model that can stop behind any of its layers. Depth d: d layers, then norm and head."""

    layers: int  # of the whole model
    head: float  # what norm and head cost, in layers
    max_length: int | None
    marks: tuple[int, ...]  # depths that may be asked for, ascending

    def grow(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        depths: Sequence[int],
    ) -> list[Float[Tensor, "n V"]]:
        """As `LanguageModel.grow`, each row at a depth of its own.

        The model's next `score` of these rows goes on where the early layers stopped, for a tree
        that begins with the nodes grown, in the order they were grown in.
        """
        ...

    def attend(self, row: DecodeState) -> None:
        """The next scores of `row` bring hidden states, though nothing is drafted for it."""
        ...

    def seen(self, row: DecodeState) -> Float[Tensor, "n L H"] | None:
        """Hidden states of the prompt's last tokens, given out once."""
        ...

    def shadows(self, states: Sequence[Float[Tensor, "n L H"]]) -> list[Shadow]:
        """What each layer would have said at each place."""
        ...


class Skips(Protocol):
    """A model that can leave sublayers out while it drafts."""

    units: int  # sublayers that may be left out, two per layer; not those of the first and last
    max_length: int | None
    searchable: bool  # `guesses` can be asked

    def grow(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        skipped: frozenset[int],
    ) -> list[Float[Tensor, "n V"]]:
        """As `LanguageModel.grow`, without these sublayers; the next `score` starts afresh."""
        ...

    def guesses(self, row: DecodeState, count: int, skipped: frozenset[int]) -> list[int]:
        """What the draft says after each of the first `count` new tokens, one forward for all."""
        ...


def skips(lm: LanguageModel) -> Skips:
    """Drafting with `lm` less some of its sublayers."""
    if layers_of(lm) < 3:
        raise CapabilityError(
            f"skipping some of {layers_of(lm)} layers was asked for.",
            "the first and the last layer always run, so it takes three or more.",
            "use method layerskip, chain, prompt-lookup or plain.",
        )
    view: Skips = _made(lm, "skips")()
    return view


class Leaves(Protocol):
    """A model whose own scoring can end before its last layer. Lossy."""

    layers: int

    def behind(self, row: DecodeState) -> int:
        """Committed tokens that will be fed again, as a forward that knew them ended early."""
        ...

    def leave(self, row: DecodeState, wish: Leave) -> None:
        """The row's next `score` may end early, as its wish says."""
        ...


def leaves(lm: LanguageModel) -> Leaves:
    """Forwards of `lm` that end early."""
    layers_of(lm)
    view: Leaves = _made(lm, "leaves")()
    return view


def exits(
    lm: LanguageModel, depths: Sequence[int] | None = None, look_back: int | None = None
) -> Exits:
    """Early exits of `lm`; the depths that will be asked for, or None for all.

    With a number to look back, scores bring the hidden states of all these depths and of the last
    layer, and so does the end of every prompt, for that many tokens.
    """
    layers = layers_of(lm)
    for depth in depths or ():
        if not 0 < depth < layers:
            raise ConfigError(
                f"an exit behind layer {depth} was asked for.",
                f"this model has {layers} layers, so an exit lies behind layer 1 to {layers - 1}.",
                f"pass an exit layer from 1 to {layers - 1}.",
            )
    view: Exits = _made(lm, "exits")(range(1, layers) if depths is None else depths, look_back)
    return view


def layers_of(lm: LanguageModel) -> int:
    """How many layers the model has."""
    layers: int = _made(lm, "layers")
    if layers < 2:
        raise CapabilityError(
            "part of a model of one layer was asked for.",
            "a model guesses for itself with some of its layers, so it needs two or more.",
            "use a method that needs no layers of its own: prompt-lookup, plain.",
        )
    return layers


def _made(lm: LanguageModel, name: str) -> Any:
    """An attribute that only models with layers of their own have."""
    if not hasattr(lm, name):
        raise CapabilityError(
            f"part of the layers of {type(lm).__name__} was asked for.",
            "it does not show its layers.",
            "use a method that needs no layers of its own: chain, prompt-lookup, plain.",
        )
    return getattr(lm, name)
