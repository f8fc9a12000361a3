"""What the runtime asks of a captured model: one call, whole or from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.lm.runtime.cache_attention import Attention
from foretoken.lm.runtime.packing import Batch
from foretoken.types import Taps

ATTENTION, MLP = 0, 1


@dataclass(frozen=True, slots=True)
class Sublayer:
    """The attention or the MLP of one decoder layer."""

    layer: int
    kind: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a captured model runs: layers from `start` to `stop`, with or without head.

    What enters the first of them is given, or made of the tokens where that is the first of all.
    From as many layers as there are, only the last norm and the head; from one more, the head.
    The sublayers in `without` add nothing to the residual stream. One that `fills` the cache, and
    is asked for nothing else, ends with the attention of the last layer.
    """

    start: int = 0
    stop: int | None = None
    head: bool = True
    without: frozenset[Sublayer] = frozenset()
    fills: bool = False


WHOLE, HEADLESS, FILLING = Cut(), Cut(head=False), Cut(head=False, fills=True)


class Captured(Protocol):
    """A captured model without its attention (`kernels.lean`)."""

    layers: int
    plain_scores: bool  # no layer caps its scores or has sinks beside its keys
    reach: int  # tokens of a forward for which products in C are the faster way

    def in_one_call(self, entered: bool = False) -> Any:
        """The whole forward of few tokens, or of what stands for their embeddings, as one call in C
        (`kernels.segments.Segment`); None where it is more than that."""
        ...

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        places: Tensor,
        attend: Attention | None,
        taps: Taps = (),
        cut: Cut = WHOLE,
        entering: Tensor | None = None,
    ) -> list[Tensor]:
        """What `taps` read, each [B, Q, H], then logits [B * P, V] at `places` of every row.

        Without a head, the last are the states [B, Q, H] that it would have read behind the layers;
        of a cut that fills the cache, they are not to be read. `entering` [B, Q, H] is what enters
        layer `cut.start`; None: the tokens' embeddings, which enter the first.
        """
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One forward over a batch."""

    batch: Batch
    places: Tensor  # that logits are wanted at
    attend: Attention
    taps: Taps

    def run(
        self,
        lean: Captured,
        cut: Cut = WHOLE,
        entering: Tensor | None = None,
        more: Taps = (),
    ) -> list[Tensor]:
        """What the taps and `more` read, then logits."""
        batch = self.batch
        taps = self.taps + more
        entering = batch.embedded if entering is None else entering
        return lean.run(batch.ids, batch.positions, self.places, self.attend, taps, cut, entering)


def end_of(lean: Captured, states: Tensor, start: int) -> Tensor:
    """Logits [n, V] of states [n, H] that enter a captured model behind all its layers."""
    places = torch.arange(len(states), device=states.device)
    cut = Cut(start, lean.layers)
    [logits] = lean.run(places[None], places[None], places, None, (), cut, states[None])
    return logits
