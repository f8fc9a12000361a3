"""Opens a model: reads its family, probes its plan, chooses its kernels, promises its bits."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from foretoken.lm.kernels.bits_probe import promise_bits
from foretoken.lm.kernels.borrowed import Borrowing
from foretoken.lm.kernels.graphs import Graphs
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.family import describe
from foretoken.lm.runtime.probe import choose_plan


def open_lm(
    model: Any, *, name: str = "target", exact_bits: bool = False, kernels: str = "auto"
) -> CachedLM:
    """A language model over a transformers model, or CapabilityError with what it lacks.

    `kernels` is a mode of `choose_kernels`. `exact_bits` promises logits and cache whose bits do
    not depend on what is scored together (`kernels.bits`), or refuses with the reason. A model that
    is refused is given back as it was.
    """
    family = describe(model)
    borrowing = Borrowing(model, name)  # in evaluation mode from here on
    with ExitStack() as refused:
        refused.callback(borrowing.close)
        lm = CachedLM(model, family, borrowing, name)
        choose_plan(lm)
        lm.kernels = promise_bits(lm) if exact_bits else borrowing.install(kernels)
        refused.pop_all()
    if lm.device.type == "cuda" and lm.plan.tree:
        lm.graphs = Graphs(lm)
    return lm
