"""A head that guesses a block in one pass, as a draft model whose levels are free (DFlash).

The pass is made at the root, over keys and values of the target's states before it; a node reads
the slot of its level, corrected by its own token where the head knows how (DSpark). Nothing of a
block is kept: a row's memory grows by what the target has committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.trained_head import (
    HeadOptions,
    TrainedHead,
    check_depth,
    reading_few,
)
from foretoken.lm.views.few_rows import is_silenced
from foretoken.trees.masks import depths
from foretoken.types import DecodeState, Ragged, Rows, Scores, Taps


@dataclass(slots=True)
class Known:
    """A row: what each layer keeps of the target's states, and the laws of the open tree."""

    memory: list[Float[Tensor, "S M"]]
    slots: Float[Tensor, "depth H"] | None = None
    laws: Float[Tensor, "depth V"] | None = None
    depths: list[int] = field(default_factory=list)  # of the nodes of the open tree

    @property
    def length(self) -> int:
        return len(self.memory[0])


class BlockReader(TrainedHead):
    """Laws by a module of the kind `dflash` or `dspark`."""

    context: int | None = None
    max_length: int | None = None  # positions are rotary
    made = Known  # what is kept of a row

    def __init__(self, target: LanguageModel, kind: str, config: HeadOptions | None = None) -> None:
        super().__init__(target, kind, config)
        self.taps = self.head.reads
        check_depth(self.taps, kind, target)
        self.target = reading_few(target, (config or self.Config()).draft_head)
        self.hidden_size = target.hidden_size
        self.deepest: int = self.head.depth

    @torch.inference_mode()
    def open(self, row: DecodeState, features: Features | None) -> bool:
        assert features is not None, "the engine asks for the taps"
        if is_silenced(self.target, row.params):
            return False
        row.private[self] = self.made(self.remembered(features, 0))
        return True

    def remembered(self, features: Features, first: int) -> list[Float[Tensor, "S M"]]:
        """What the layers keep of states that stand at the positions from `first` on."""
        positions = torch.arange(first, first + len(features), device=self.like.device)
        kept = self.head.remember(features.to(self.like)[None], positions[None])
        return [rows[0] for rows in kept]

    @torch.inference_mode()
    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Laws after new nodes; blocks are guessed for all roots among them, in one pass."""
        roots = [row for row, above in zip(rows, parents, strict=True) if above[0] < 0]
        # A batch is padded and multiplied otherwise than a lone row, which a seed has to repeat.
        shared = [row for row in roots if not row.repeatable]
        if shared:
            self.guess(shared)
        for row in roots:
            if row.repeatable:
                self.guess([row])
        found = []
        for row, new, above in zip(rows, tokens, parents, strict=True):
            known: Known = row.private[self]
            assert known.laws is not None and known.slots is not None, "its root was fed"
            known.depths += depths(above, known.depths)
            levels = known.depths[-len(new) :]
            ids = torch.tensor(new, device=self.like.device)
            hidden = known.slots[levels][:, None].expand(-1, len(taps), -1) if taps else None
            found.append(Scores(known.laws[levels] + self.head.correction(ids), hidden))
        return found

    def guess(self, rows: Rows) -> None:
        """Blocks behind the last tokens of rows, whose memories are of different lengths."""
        known: list[Known] = [row.private[self] for row in rows]
        longest = max(one.length for one in known)
        sizes = torch.tensor([[one.length] for one in known], device=self.like.device)
        sees = torch.arange(longest, device=self.like.device)[None, None] < sizes[..., None]
        memories = [
            torch.nn.utils.rnn.pad_sequence(list(kept), batch_first=True)
            for kept in zip(*(one.memory for one in known), strict=True)
        ]
        anchors = self.target.embed([row.tokens[-1] for row in rows]).to(self.like)
        slots = self.head(anchors[:, None], sizes, sees, memories)[:, 0]
        laws = self.target.unembed(slots.flatten(0, 1)).view(*slots.shape[:2], -1)
        for one, own, law in zip(known, slots, laws, strict=True):
            one.slots, one.laws, one.depths = own, law, []

    @torch.inference_mode()
    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        """Remember the target's states of what was committed; the block is forgotten."""
        for row, seen in zip(rows, features, strict=True):
            assert seen is not None, "features come with every verdict"
            known: Known = row.private[self]
            new = self.remembered(seen, known.length)
            memory = [torch.cat(pair) for pair in zip(known.memory, new, strict=True)]
            row.private[self] = self.made(memory)
