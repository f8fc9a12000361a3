"""A draft model runs beam sampling ahead of the target (DSBD, arXiv 2409.16560).

Each layer is M independent draws from one law over all (beam, token) pairs of the layer before.
Equal draws are one node: they are attempts at the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foretoken.contract import NoOptions
from foretoken.errors import ConfigError
from foretoken.lm.runtime.branches import BranchingLM, Columns, feed, prune
from foretoken.lm.views.few_rows import is_silenced
from foretoken.trees.forest import BeamRow, Cut, Layer
from foretoken.types import Budget, Draw, Memory, Shape, Traits
from foretoken.warp.joint import joint_law


class NoBeams:
    """Drafts nothing: plain beam sampling through the same loop."""

    traits = Traits(frozenset({Draw.JOINT}), Shape.TREE, memory=Memory.NOTHING)
    lossless = True
    why = ""
    law = "beam sampling"

    Config: Any = NoOptions

    def __init__(self, config: NoOptions | None = None) -> None:
        """Nothing is chosen."""

    def fitting(self, depth: int | None, nodes: int | None) -> Budget | None:
        if nodes is not None:
            raise ConfigError(
                f"nodes={nodes} was asked for with beams.",
                "a layer holds as many nodes as there are beams, so a draft is cut by its depth.",
                "pass depth, num_beams or samples instead.",
            )
        return None

    def start(self, row: BeamRow) -> None:
        return None

    def propose(self, rows: Sequence[BeamRow], depths: Sequence[int]) -> list[tuple[Layer, ...]]:
        return [() for _ in rows]

    def settle(self, rows: Sequence[BeamRow], cuts: Sequence[Cut]) -> None:
        return None

    def finish(self, row: BeamRow) -> None:
        return None


@dataclass(slots=True)
class Drafted:
    """One row while a draft is made."""

    row: BeamRow
    nodes: list[int]  # the texts drafted so far, ends aside
    weights: list[float]
    layers: list[Layer] = field(default_factory=list)


class BeamModel(NoBeams):
    """One draft forward per layer over all rows."""

    law = "dynamic-width beam sampling"

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        # M: draws per layer, min_width of the rule at least; 0: as many as there are beams
        samples: int = 0

    def __init__(self, draft_lm: BranchingLM, config: Config | None = None) -> None:
        self.lm, self.samples = draft_lm, (config or self.Config()).samples
        if self.samples < 0:
            raise ConfigError(
                f"samples={self.samples} was asked for.",
                "samples counts the draws of a layer; 0 draws as many as there are beams.",
                "pass samples=0 or more.",
            )

    def start(self, row: BeamRow) -> None:
        # A prompt beyond the draft model's positions is written without guesses, and so is a text
        # that may have none of its tokens.
        fits = self.lm.max_length is None or len(row.state.tokens) <= self.lm.max_length
        if fits and not is_silenced(self.lm, row.state.params):
            self.lm.prefill([row.state])
            columns: Columns = {}
            row.state.private[self] = columns

    def propose(self, rows: Sequence[BeamRow], depths: Sequence[int]) -> list[tuple[Layer, ...]]:
        """Up to `depths[i]` layers below the beams of row i; their nodes enter its forest."""
        drafts = [
            Drafted(row, [beam.node for beam in row.beams], [beam.weight for beam in row.beams])
            for row in rows
        ]
        reach = [self._reach(row, depth) for row, depth in zip(rows, depths, strict=True)]
        for layer in range(max(reach, default=0)):
            open_ = [
                draft
                for draft, far in zip(drafts, reach, strict=True)
                if layer < far and draft.nodes
            ]
            if not open_:
                break
            logits = feed(
                self.lm,
                [draft.row.state for draft in open_],
                [draft.row.forest for draft in open_],
                [draft.row.state.private[self] for draft in open_],
                [draft.nodes for draft in open_],
            )
            for draft, scored in zip(open_, logits, strict=True):
                self._extend(draft, scored)
        return [tuple(draft.layers) for draft in drafts]

    def settle(self, rows: Sequence[BeamRow], cuts: Sequence[Cut]) -> None:
        """Follow the rows, whose forests were cut."""
        pairs = zip(rows, cuts, strict=True)
        held = [(row.state, cut) for row, cut in pairs if self in row.state.private]
        if held:
            prune(
                self.lm,
                [row for row, _ in held],
                [row.private[self] for row, _ in held],
                [cut for _, cut in held],
            )

    def finish(self, row: BeamRow) -> None:
        row.state.private.pop(self, None)
        self.lm.free([row.state])

    def _reach(self, row: BeamRow, depth: int) -> int:
        """Layers that the draft model's positions allow."""
        if self not in row.state.private:
            return 0
        if self.lm.max_length is not None:
            written = row.state.prompt_len + row.length
            depth = min(depth, self.lm.max_length - written + 1)
        return max(depth, 0)

    def _extend(self, draft: Drafted, logits: torch.Tensor) -> None:
        """Draw one layer."""
        row, forest, state = draft.row, draft.row.forest, draft.row.state
        paths = [forest.text(node) for node in draft.nodes]
        try:
            q = joint_law(state.warp, state.tokens, paths, draft.weights, logits).law
        except ConfigError:  # the options leave this draft nothing; the target may have more
            draft.nodes, draft.weights = [], []
            return
        vocab = logits.shape[-1]
        count = 1 if state.warp.greedy else self.samples or row.width
        pairs = [state.coins.draw(q) for _ in range(count)]
        nodes = [forest.child(draft.nodes[pair // vocab], pair % vocab) for pair in pairs]
        draft.layers.append(Layer(tuple(draft.nodes), q, tuple(pairs), tuple(nodes)))
        live = {
            node: float(q[pair].log())
            for node, pair in zip(nodes, pairs, strict=True)
            if forest.tokens[node] not in state.params.eos
        }
        draft.nodes, draft.weights = list(live), list(live.values())
