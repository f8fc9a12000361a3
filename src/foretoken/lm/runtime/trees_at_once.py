"""Trees of guesses in one call: forwards in C, and in between what the next one feeds.

Where a draft model is small its forwards take a fraction of a millisecond, and Python between two
of them as much again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.lm.runtime.batch_forward import BatchForward
from foretoken.lm.runtime.cache import SlotCache
from foretoken.lm.runtime.packing import Memory
from foretoken.lm.runtime.slot_attention import IN_ONE_CALL
from foretoken.native.growth import Grove, Planted
from foretoken.native.library import NARROW
from foretoken.trees.growing import Grown, GrowthRule
from foretoken.trees.masks import ancestors
from foretoken.types import Rows

LANES = 32  # numbers that rows of a table have a multiple of: two registers at most


class TreesAtOnce:
    """Grows trees of a model that was captured, whose forward of few tokens is one call."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.grove = Grove(dtype)
        self.seconds = 0.0  # that the forwards of the last call took
        # for logits, and for what enters: fresh memory costs a fault every 4 KiB
        self.room: Tensor | None = None
        self.entry: Tensor | None = None

    def grow(
        self,
        forward: BatchForward,
        rows: Rows,
        memories: Sequence[Memory],
        rules: Sequence[GrowthRule],
        names: Tensor | None,
        table: Float[Tensor, "V H"] | None,
    ) -> list[Grown | None]:
        """New trees of the rows; None for one that is to be asked for level by level, of which
        nothing was fed. `names` are the tokens of the first columns of the logits, None those of
        all; a `table` is that of `CachedLM.grow_trees`.
        """
        self.seconds = 0.0
        found: list[Grown | None] = [None] * len(rows)
        stretch = in_one_call(forward, table)
        if stretch is None:
            return found
        [(_, form, _)] = stretch.results
        columns = form.shape[0] if names is None else len(names)
        if columns < NARROW:  # level by level, torch's operations look for the likeliest of few
            return found
        most = min(forward.lean.reach, IN_ONE_CALL)  # type: ignore[union-attr]
        asked = [
            (row.tokens, memory, rule, i)
            for i, (row, memory, rule) in enumerate(zip(rows, memories, rules, strict=True))
            if self.grove.takes(rule, columns, names)
            and (memory.supplied is None) == (table is None)
            and fits(forward, len(row.tokens) - 1, memory, rule, most)
        ]
        cache = forward.cache
        if asked:
            slots, stops = zip(*[(one[1].slot, len(one[0])) for one in asked], strict=True)
            cache.reserve(slots, stops)
        if not asked or not forward.in_slots.takes(1):
            return found
        trees = self.grove.planted(len(asked))
        for tree, (tokens, memory, rule, _) in zip(trees, asked, strict=True):
            root = len(tokens) - 1
            tree.place(memory.slot, root, cache.columns - root, tokens[memory.cached : root])
            tree.plant(tokens[root], rule)
            if memory.supplied is not None:
                assert len(memory.supplied) == root + 1 - memory.cached, "one for each token fed"
                tree.enters(memory.supplied)
        self.run(forward, stretch, most, trees, [rule for _, _, rule, _ in asked], names, table)
        for tree, (_, memory, _, i) in zip(trees, asked, strict=True):
            found[i] = grown = tree.tree()
            if grown is not None:
                settle(forward.cache, memory, tree, grown)
                grown.said = None if table is None else tree.said[: tree.state.fed].clone()
        return found

    def run(
        self,
        forward: BatchForward,
        stretch: Any,
        most: int,
        trees: Sequence[Planted],
        rules: Sequence[GrowthRule],
        names: Tensor | None,
        table: Float[Tensor, "V H"] | None,
    ) -> None:
        """Let planted trees grow by forwards of at most so many tokens."""
        slots, asked = forward.in_slots, self.grove.forward
        [(buffer, form, _)] = stretch.results
        [columns] = form.shape
        arena = stretch.arena(most)
        widest = min(most, sum([rule.nodes for rule in rules]))
        logits = self.room
        if logits is None or logits.numel() < widest * columns:
            logits = forward.masks.nothing.new_empty(widest * columns)
        self.room = None if forward.cache.exact else logits  # a budget counts on what is given back
        asked.logits = arena.bases[buffer] = logits.data_ptr()
        asked.steps, asked.step_count = stretch.address, stretch.count
        asked.buffers, asked.layers = arena.address, slots.layers_of(stretch)
        asked.threads, asked.most = torch.get_num_threads(), most
        asked.widest = min(most, slots.reach)
        asked.apart, asked.columns = columns, columns if names is None else len(names)
        asked.table = asked.entry = None
        if table is not None:
            self.enter_by(table, asked, arena.bases, stretch.given[0].buffer, most)
        self.seconds = self.grove.grow(trees, rules, names)
        stretch.give_back(arena)

    def enter_by(
        self, table: Float[Tensor, "V H"], asked: Any, bases: Any, buffer: int, most: int
    ) -> None:
        """Have the forward read what is made of the table for at most so many tokens."""
        width = table.shape[1]
        if self.entry is None or self.entry.shape != (most, width):
            self.entry = table.new_empty(most, width)
        asked.table, asked.width = table.data_ptr(), width
        asked.entry = bases[buffer] = self.entry.data_ptr()


def in_one_call(forward: BatchForward, table: Tensor | None) -> Any:
    """A model's forward of few tokens, where it is a stretch of steps in C and nothing else."""
    lean = forward.lean
    if lean is None or not lean.plain_scores or forward.device.type != "cpu":
        return None
    if table is not None and (table.shape[1] % LANES or not table.is_contiguous()):
        return None
    return None if forward.family.switch is not None else lean.in_one_call(table is not None)


def fits(forward: BatchForward, root: int, memory: Memory, rule: GrowthRule, most: int) -> bool:
    """Whether a row's first forward is a small one, and no window hides any of its tree."""
    if root - memory.cached >= most:
        return False
    windows = [window for window in forward.family.windows if window is not None]
    return not windows or root + rule.depth < min(windows)


def settle(cache: SlotCache, memory: Memory, tree: Planted, grown: Grown) -> None:
    """Note what was cached."""
    state, fed = tree.state, tree.state.fed
    tokens = [0] * fed
    for token, place in zip(grown.tokens, grown.places, strict=True):
        if place >= 0:
            tokens[place] = token
    memory.forget()
    if memory.supplied is not None:
        memory.supplied = memory.supplied[:0].clone()  # which does not keep the others
    memory.cached, memory.tokens, memory.depths = state.root, tokens, state.depths[:fed]
    memory.seen = ancestors(state.above[:fed])
    cache.reserve([memory.slot], [state.root + fed])
