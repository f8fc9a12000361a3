"""Targets wrapped in views: the same weights and cache, used in part.

Self-speculation drafts with part of its own target, so nothing is loaded twice. A drafter that
scores through a view shows it as its `view`, and the engine then scores through it.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.contract import LanguageModel
from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.table import TableLM
from foretoken.lm.views.early_exit_scoring import EarlyExitScoring
from foretoken.lm.views.early_exits import EarlyExits
from foretoken.lm.views.skipped_layers import SkippedLayers
from foretoken.lm.views.table_views import (
    TableEarlyExits,
    TableEarlyExitScoring,
    TableSkippedLayers,
)
from foretoken.lm.views.view import innermost


def early_exits(
    lm: LanguageModel, depths: Sequence[int] | None = None
) -> EarlyExits | TableEarlyExits:
    """Drafting behind the first layers of `lm`; the depths that will be asked for, or None: all."""
    layers = layers_of(lm)
    for depth in depths or ():
        if not 0 < depth < layers:
            raise ConfigError(
                f"an exit behind layer {depth} was asked for.",
                f"this model has {layers} layers, so an exit lies behind layer 1 to {layers - 1}.",
                f"pass an exit layer from 1 to {layers - 1}.",
            )
    depths = tuple(sorted(depths or range(1, layers)))
    return TableEarlyExits(lm, depths) if is_table(lm) else EarlyExits(lm, depths)


def skipped_layers(lm: LanguageModel) -> SkippedLayers | TableSkippedLayers:
    """Drafting with `lm` less some of its sublayers."""
    if layers_of(lm) < 3:
        raise CapabilityError(
            f"skipping some of {layers_of(lm)} layers was asked for.",
            "the first and the last layer always run, so it takes three or more.",
            "use method layerskip, chain, prompt-lookup or plain.",
        )
    return TableSkippedLayers(lm) if is_table(lm) else SkippedLayers(lm)


def early_exit_scoring(lm: LanguageModel) -> EarlyExitScoring | TableEarlyExitScoring:
    """Scoring by `lm` that may end before its last layer. Lossy."""
    layers_of(lm)
    return TableEarlyExitScoring(lm) if is_table(lm) else EarlyExitScoring(lm)


def layers_of(lm: LanguageModel) -> int:
    """How many layers the model has."""
    model = innermost(lm)
    if not isinstance(model, CachedLM | TableLM):
        raise CapabilityError(
            f"part of the layers of {type(model).__name__} was asked for.",
            "it does not show its layers.",
            "use a method that needs no layers of its own: chain, prompt-lookup, plain.",
        )
    if model.layers < 2:
        raise CapabilityError(
            "part of a model of one layer was asked for.",
            "a model guesses for itself with some of its layers, so it needs two or more.",
            "use a method that needs no layers of its own: prompt-lookup, plain.",
        )
    return model.layers


def is_table(lm: LanguageModel) -> bool:
    return isinstance(innermost(lm), TableLM)
