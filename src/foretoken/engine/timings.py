"""How repeated timings become costs, and what of a target was timed before."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.lm.views.view import innermost
from foretoken.types import CostTable, Prices

TOO_DEAR = Prices(1e9, (0.0, *[1e9] * 64), 1e9)  # nothing is worth these


def settled(times: Sequence[float]) -> float:
    """Lower quartile without the warm-up: what disturbs a forward only ever makes it longer."""
    times = sorted(times[1:] or times)
    return times[(len(times) - 1) // 4]


def wait_for(values: Tensor) -> None:
    """On a GPU, the end of the work and not of its launch."""
    if values.is_cuda:
        torch.cuda.synchronize(values.device)


_timed: WeakKeyDictionary[LanguageModel, dict[type, dict[int, float]]] = WeakKeyDictionary()
_batches: WeakKeyDictionary[LanguageModel, dict[type, dict[int, CostTable]]] = WeakKeyDictionary()


def timed_before(target: LanguageModel) -> dict[int, float]:
    """Seconds of forwards by nodes, as measured for other methods around the same target."""
    by_view = _timed.setdefault(innermost(target), {})  # a view may leave layers out
    return by_view.setdefault(type(target), {})


def batches_before(target: LanguageModel) -> dict[int, CostTable]:
    """The same for batches, by their number of rows."""
    by_view = _batches.setdefault(innermost(target), {})
    return by_view.setdefault(type(target), {})
