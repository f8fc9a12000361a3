"""A lone row's tree of guesses in one call: forwards in C, and in between what the next one feeds.

Where a draft model is small its forwards take a fraction of a millisecond, and Python between two
of them as much again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.lm.runtime.batch_forward import BatchForward
from foretoken.lm.runtime.packing import Memory
from foretoken.lm.runtime.slot_attention import IN_ONE_CALL
from foretoken.native.growth import Growing
from foretoken.trees.growing import Grown, GrowthRule
from foretoken.trees.masks import ancestors
from foretoken.types import DecodeState


class TreesAtOnce:
    """Grows trees of a model that was captured, whose forward of few tokens is one call."""

    def __init__(self, forward: BatchForward) -> None:
        self.forward = forward
        self.growing = Growing(forward.model.dtype)
        self.logits = forward.masks.nothing.new_empty(0)  # what the last forward of a tree said

    def grow(
        self, row: DecodeState, memory: Memory, rule: GrowthRule, names: Tensor | None
    ) -> Grown | None:
        """A new tree of the row; None where it has to be asked for level by level, and nothing was
        done. `names` are the tokens of the first columns of the logits, None those of all.
        """
        forward, state = self.forward, self.growing.state
        root = len(row.tokens) - 1
        late = root - memory.cached
        most = 0 if memory.supplied is not None else self.reach(root, late, rule)
        if late >= most or not self.growing.takes(rule):
            return None
        lean, slots = forward.lean, forward.in_slots
        stretch = None if lean is None else lean.in_one_call()
        if stretch is None or not slots.takes(late + 1):
            return None
        forward.cache.reserve([memory.slot], [root + 1])
        if not slots.takes(late + 1):  # of other buffers, perhaps
            return None
        [(buffer, form, _)] = stretch.results
        [columns] = form.shape
        arena = stretch.arena(most)
        if self.logits.numel() < most * columns:
            self.logits = forward.masks.nothing.new_empty(most * columns)
        arena.bases[buffer] = self.logits.data_ptr()
        state.steps, state.step_count = stretch.address, stretch.count
        state.buffers, state.layers = arena.address, slots.layers_of(stretch)
        state.threads, state.logits = torch.get_num_threads(), self.logits.data_ptr()
        state.apart, state.columns = columns, columns if names is None else len(names)
        state.late, state.root, state.most = late, root, min(most, slots.reach)
        state.room, state.row.slot = forward.cache.columns - root, memory.slot
        if late:
            state.ids[:late] = row.tokens[root - late : root]
        whole = self.growing.grow(row.tokens[root], rule, names)
        stretch.give_back(arena)
        if not state.fed:
            return None
        return self.settle(memory, self.growing.tree(whole), root)

    def reach(self, root: int, late: int, rule: GrowthRule) -> int:
        """Tokens of one forward that may be fed in one call; zero: none."""
        forward = self.forward
        lean, family = forward.lean, forward.family
        if lean is None or not lean.plain_scores or forward.graphs is not None:
            return 0
        windows = [window for window in family.windows if window is not None]
        if family.switch is not None or root + rule.depth >= min(windows, default=root + 2**31):
            return 0
        return min(lean.reach, IN_ONE_CALL, max(rule.nodes, late + 1))

    def settle(self, memory: Memory, tree: Grown, root: int) -> Grown:
        """Note what was cached."""
        state = self.growing.state
        fed = state.fed
        tokens = [0] * fed
        for token, place in zip(tree.tokens, tree.places, strict=True):
            if place >= 0:
                tokens[place] = token
        memory.forget()
        memory.cached, memory.tokens, memory.depths = root, tokens, state.depths[:fed]
        memory.seen = ancestors(state.above[:fed])
        self.forward.cache.reserve([memory.slot], [root + fed])
        return tree
