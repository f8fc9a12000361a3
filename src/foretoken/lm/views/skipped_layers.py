"""Drafting with a CachedLM that leaves sublayers out (SWIFT, arXiv 2410.06916, section 3).

A sublayer is the attention or the MLP of one layer; left out, it adds nothing to the residual
stream. The first and the last layer always run. Drafted nodes lie in the row's own cache as an open
tree, which the next scoring writes anew, so nothing has to be restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foretoken.contract import LanguageModel
from foretoken.errors import CapabilityError
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.captured import ATTENTION, MLP, Call, Captured, Cut, Sublayer
from foretoken.lm.runtime.family import sublayers
from foretoken.lm.runtime.packing import Feed, tree_feed
from foretoken.lm.runtime.partial_forwards import (
    Forward,
    Stack,
    replaced,
    returned_lengths,
)
from foretoken.lm.runtime.probe import probe_row, refused, some_tokens
from foretoken.lm.runtime.sharing import exclusive
from foretoken.lm.views.view import TargetView
from foretoken.trees.masks import prefixes
from foretoken.types import DecodeState, Ragged, Rows


@dataclass(frozen=True, slots=True)
class Skipping:
    """A forward that leaves sublayers out."""

    forwards: dict[nn.Module, Forward]
    parts: frozenset[Sublayer]
    head: bool = True

    def run(self, lean: Captured, call: Call) -> list[Tensor]:
        """The same of a captured model."""
        return call.run(lean, Cut(without=self.parts))

    def entered(
        self, stack: Stack, feeds: Sequence[Feed], width: int
    ) -> AbstractContextManager[None]:
        return replaced(self.forwards)


class SkippedLayers(TargetView):
    """Sublayer `2 i` is the attention of layer i + 1, sublayer `2 i + 1` its MLP."""

    base: CachedLM

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(lm)
        family = self.base.family
        asked = f"drafting with skipped layers of {family.name} was asked for."
        if family.switch is not None:
            raise CapabilityError(
                asked,
                f"longrope scales all positions of a call anew beyond {family.switch}.",
                "use method chain, prompt-lookup or plain.",
            )
        self.inner = self.base.stack.layers[1:-1]
        self.parts = [part for layer in self.inner for part in parts_of(layer, family.name)]
        self.shapes = returned_lengths(self.base.model, self.parts)
        self.units = len(self.parts)  # sublayers that may be left out
        # `guesses` can be asked: it feeds tokens far from their own columns
        self.searchable = not self.base.plan.ordered
        with refused(asked, "left out"):  # as where some read keys of others, left out before
            draft_once(self)

    @exclusive
    def draft(
        self, rows: Rows, tokens: Ragged, parents: Ragged, skipped: frozenset[int]
    ) -> list[Float[Tensor, "n V"]]:
        """Append nodes to the rows' open trees, without these sublayers; their logits."""
        feeds = []
        for row, new, above in zip(rows, tokens, parents, strict=True):
            memory = self.base._memory(row)
            if above[0] < 0:
                memory.forget()
                self.base._fill([row])
            feeds.append(tree_feed(memory, (), new, above))
        return [score.logits for score in self.base._run(feeds, (), self.without(skipped))]

    @exclusive
    def guesses(self, row: DecodeState, count: int, skipped: frozenset[int]) -> list[int]:
        """What the draft says after each of the first `count` new tokens, one forward for all.

        It sees the prompt as the whole model cached it, and the new tokens as it reads them itself.
        """
        memory = self.base._memory(row)
        assert not memory.tokens, "a search beside an open tree"
        base, start = row.prompt_len, memory.cached
        assert start > base, "a search before anything was written"
        positions = list(range(base, base + count))
        feed = Feed(
            memory,
            base=base,
            start=start,
            tokens=row.tokens[base : base + count],
            positions=positions,
            seen=[bits << (start - base) for bits in prefixes(count)],
            key_positions=[*range(base, start), *positions],
            scored=count,
            cached=start,
        )
        [score] = self.base._run([feed], (), self.without(skipped))
        chosen: list[int] = score.logits.argmax(-1).tolist()
        return chosen

    def fits(self, row: DecodeState, count: int) -> bool:
        """Whether `guesses` of so many tokens keep within the columns that a plan granted."""
        return bool(self.base.cache.takes(self.base._memory(row).cached + count))

    def without(self, skipped: frozenset[int]) -> Skipping:
        """Whole layers are passed by; a lone sublayer adds zeros."""
        stack = self.base.stack
        forwards: dict[nn.Module, Forward] = {}
        for index, layer in enumerate(self.inner):
            pair = 2 * index + ATTENTION, 2 * index + MLP
            left = [unit for unit in pair if unit in skipped]
            if len(left) == len(pair):
                forwards[layer] = stack.passing(index + 1)
            for unit in left if len(left) == 1 else ():
                forwards[self.parts[unit]] = adding_nothing(self.shapes[unit])
        parts = frozenset(Sublayer(1 + unit // 2, unit % 2) for unit in skipped)
        return Skipping(forwards, parts)


@torch.inference_mode()
def draft_once(view: SkippedLayers) -> None:
    """A token behind a short text, without any sublayer that may be left out."""
    row = probe_row(some_tokens(7, view.vocab_size, 0))
    view.prefill([row])
    try:
        view.draft([row], [row.tokens[-1:]], [(-1,)], frozenset(range(view.units)))
    finally:
        view.free([row])


def parts_of(layer: nn.Module, family: str) -> tuple[nn.Module, nn.Module]:
    """The attention and the MLP of a decoder layer."""
    found = sublayers(layer)
    if found is None:
        raise CapabilityError(
            f"drafting with skipped layers of {family} was asked for.",
            f"attention and MLP are no modules of their own in {type(layer).__name__}.",
            "use method layerskip, chain, prompt-lookup or plain.",
        )
    return found


def adding_nothing(length: int) -> Forward:
    """A sublayer's forward that returns zeros, in a tuple of `length` where it is above zero."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        nothing = torch.zeros_like(states)
        return (nothing, *(None,) * (length - 1)) if length else nothing

    return forward
