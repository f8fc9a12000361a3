"""Heads that read the target's last state and the tokens drafted since, as a draft model (Hydra).

The state is the one behind which the row's last token was said. Nothing is cached but the
embeddings along each path of the open tree; a head for every depth, and no deeper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.trained_head import HeadOptions, TrainedHead, reading_few
from foretoken.lm.views.few_rows import is_silenced
from foretoken.types import DecodeState, FinalNorm, Ragged, Rows, Scores, Taps


@dataclass(slots=True)
class Known:
    """A row: its state, and the embeddings from the root to each node of the open tree."""

    state: Float[Tensor, "H"]
    paths: list[Float[Tensor, "k H"]] = field(default_factory=list)


class PathHeads(TrainedHead):
    """Laws by a module that maps a state and a path's embeddings to what the outputs read."""

    context: int | None = 1
    max_length: int | None = None

    def __init__(self, target: LanguageModel, kind: str, config: HeadOptions | None = None) -> None:
        super().__init__(target, kind, config)
        self.target = target = reading_few(target, (config or self.Config()).draft_head)
        self.hidden_size = target.hidden_size
        self.deepest: int = self.head.depth
        self.nothing = self.like.new_zeros(self.hidden_size)

    def open(self, row: DecodeState, features: Features | None) -> bool:
        if is_silenced(self.target, row.params):
            return False
        state = self.nothing  # before a single token nothing was said
        if features is not None and len(features):
            state = features[-1, 0].to(self.nothing)
        row.private[self] = Known(state)
        return True

    @torch.inference_mode()
    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Laws after new nodes, in one call of a head for each depth."""
        assert all(tap == FinalNorm() for tap in taps), "it guesses what the output layer reads"
        embedded = self.target.embed([token for new in tokens for token in new]).to(self.nothing)
        parts = torch.split(embedded, [len(new) for new in tokens])
        asked: dict[int, list[tuple[int, Tensor, Tensor]]] = {}  # by depth: place, state, path
        place = 0
        for row, above, new in zip(rows, parents, parts, strict=True):
            known: Known = row.private[self]
            if above[0] < 0:
                known.paths = []
            for parent, own in zip(above, torch.split(new, 1), strict=True):
                path = own if parent < 0 else torch.cat([known.paths[parent], own])
                known.paths.append(path)
                asked.setdefault(len(path), []).append((place, known.state, path))
                place += 1
        guessed = torch.empty_like(embedded)
        for some in asked.values():
            places, states, paths = zip(*some, strict=True)
            guessed[list(places)] = self.head(torch.stack(states), torch.stack(paths))
        logits = torch.split(self.target.unembed(guessed), [len(new) for new in tokens])
        shown = torch.split(guessed[:, None].expand(-1, len(taps), -1), [len(n) for n in tokens])
        return [
            Scores(said, states if taps else None)
            for said, states in zip(logits, shown, strict=True)
        ]

    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        for row, seen in zip(rows, features, strict=True):
            assert seen is not None, "features come with every verdict"
            row.private[self] = Known(seen[-1, 0].to(self.nothing, copy=True))
