"""Early exits of a CachedLM: its first layers draft, and its scoring goes on where they stopped.

Draft and target are one model with one cache. A drafted node leaves keys and values in the first
layers and its hidden state at the exit; when the tree is scored, only the layers behind the exit
run, and all of them for nodes nobody fed. A round of g drafted tokens costs g E + L layers
(LayerSkip, arXiv 2404.16710, section 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.coins import SeededCoins
from foretoken.errors import CapabilityError
from foretoken.lm.feed import Early, Memory, tree_feed
from foretoken.lm.probe import ALLOWED, difference, some_tokens
from foretoken.lm.shadow import Shadow, Watched
from foretoken.lm.stages import Stage
from foretoken.types import DecodeState, Draft, Draw, SamplingParams, Scores, TokenTree

READ_AT_ONCE = 64  # states given to the head together: their logits are large, and read once

if TYPE_CHECKING:
    from foretoken.lm.cached import CachedLM


class CachedExits:
    """Drafting behind the layers of a CachedLM. Depth d is the first d layers, norm and head."""

    def __init__(self, lm: CachedLM, marks: Sequence[int], look_back: int | None = None) -> None:
        self.lm, self.marks = lm, tuple(sorted(marks))
        self.layers = len(lm.stack.layers)
        self.head = lm.stack.head(lm.model)
        self.max_length = lm.max_length
        self.wanted: tuple[int, ...] = ()
        if lm.family.switch is not None:
            raise CapabilityError(
                f"early exits of {lm.family.name} were asked for.",
                f"longrope scales all positions of a call anew beyond {lm.family.switch}, so work "
                "cannot be split between two calls.",
                "use method chain, prompt-lookup or plain.",
            )
        if (error := probe(self)) > ALLOWED.get(lm.model.dtype, 2e-1):
            raise CapabilityError(
                f"early exits of {lm.family.name} were asked for.",
                f"its layers run in two parts are off by {error:.0%} of the logits' spread.",
                "use method chain, prompt-lookup or plain.",
            )
        if look_back is not None:
            self.wanted = (*self.marks, self.layers)
            lm.watched = Watched(taps(self.wanted), look_back)

    @torch.inference_mode()
    def grow(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        depths: Sequence[int],
    ) -> list[Float[Tensor, "n V"]]:
        """Append nodes to the rows' early trees; one forward as deep as the deepest row's."""
        feeds, open_trees = [], []
        for row, new, above, depth in zip(rows, tokens, parents, depths, strict=True):
            early = self._opened(row, depth) if above[0] < 0 else self._early(row)
            assert early.depth == depth, "a tree was gone on with at another depth"
            early.parents += above
            feeds.append(tree_feed(early.memory, (), new, above))
            open_trees.append(early)
        stop = max(depths)
        marks = upto(self.marks, stop)
        exits = {early.memory.slot: early.depth for early in open_trees}
        ran = self.lm._run(feeds, taps(marks), Stage(0, stop, exits=exits))
        for early, (_, states) in zip(open_trees, ran, strict=True):
            assert states is not None
            early.states.append(states[:, : len(early.marks)])
        return [logits for logits, _ in ran]

    def _opened(self, row: DecodeState, depth: int) -> Early:
        """A new tree at the row's last token, behind a cache that holds all others."""
        lm, memory = self.lm, self.lm._memory(row)
        assert depth in self.marks, f"depth {depth} is none of the exits {self.marks}"
        memory.forget()
        lm._fill(memory, row.tokens, ())
        tree = Memory(memory.slot, memory.cached)
        memory.early = Early(tree, depth, upto(self.marks, depth), self.wanted)
        return memory.early

    def attend(self, row: DecodeState) -> None:
        """The next scores of `row` bring hidden states, though nothing is drafted for it."""
        self._opened(row, self.marks[0])

    def seen(self, row: DecodeState) -> Float[Tensor, "n L H"] | None:
        """Hidden states of the prompt's last tokens, once."""
        memory = self.lm._memory(row)
        shown, memory.shown = memory.shown, None
        return shown

    @torch.inference_mode()
    def shadows(self, states: Sequence[Float[Tensor, "n L H"]]) -> list[Shadow]:
        """What each layer would have said: the head over many states at once, in chunks."""
        flat = torch.cat([one.flatten(0, 1) for one in states])
        tokens, sure = [], []
        for chunk in torch.split(flat, READ_AT_ONCE):
            logits = self.lm.stack.read_out(self.lm.model, chunk).float()
            best, token = logits.max(-1)
            tokens.append(token)
            sure.append((best - logits.logsumexp(-1)).exp())
        cut = [one.shape[0] * one.shape[1] for one in states]
        shape = [one.shape[:2] for one in states]
        parts = torch.split(torch.cat(tokens), cut), torch.split(torch.cat(sure), cut)
        return [Shadow(token.view(n), p.view(n)) for token, p, n in zip(*parts, shape, strict=True)]

    def _early(self, row: DecodeState) -> Early:
        early = self.lm._memory(row).early
        assert early is not None, "nodes were appended to a tree that was never opened"
        return early


def finish(
    lm: CachedLM,
    rows: Sequence[DecodeState],
    trees: Sequence[TokenTree],
    drafted: Sequence[Early | None],
) -> list[Scores]:
    """Score trees that early layers have seen the beginning of.

    The rest starts at the shallowest exit of the batch, for one forward of all rows: what a row
    with a deeper exit computes twice costs arithmetic, and the weights are read once.
    """
    begun = [
        early if early is not None and early.opens(tree.tokens, tree.parents) else None
        for early, tree in zip(drafted, trees, strict=True)
    ]
    wanted = next(early.wanted for early in drafted if early is not None)
    fed = [early for early in begun if early is not None and early.parents]
    if not fed:
        nodes = [tree.tokens for tree in trees], [tree.parents for tree in trees]
        return [Scores(*scored) for scored in lm._advance(rows, *nodes, taps(wanted))]
    start = min(early.depth for early in fed)
    marks = upto(fed[0].marks, start)
    early = catch_up(lm, rows, trees, begun, start, marks)
    outputs = [torch.cat([part[:, : len(marks)] for part in one.states]) for one in early]
    late = [
        tree_feed(lm._memory(row), (), tree.tokens, tree.parents)
        for row, tree in zip(rows, trees, strict=True)
    ]
    entering = {one.memory.slot: output[:, -1] for one, output in zip(early, outputs, strict=True)}
    after = tuple(mark for mark in wanted if mark > start)
    ran = lm._run(late, taps(after), Stage(start, len(lm.stack.layers), states=entering))
    if not wanted:
        return [Scores(logits) for logits, _ in ran]
    return [
        Scores(logits, torch.cat([output, hidden], dim=1))
        for output, (logits, hidden) in zip(outputs, ran, strict=True)
        if hidden is not None
    ]


def catch_up(
    lm: CachedLM,
    rows: Sequence[DecodeState],
    trees: Sequence[TokenTree],
    begun: Sequence[Early | None],
    start: int,
    marks: tuple[int, ...],
) -> list[Early]:
    """Feed the nodes that no draft has fed to the layers before `start`, without a head."""
    feeds, open_trees = [], []
    for row, tree, early in zip(rows, trees, begun, strict=True):
        if early is None or not early.parents:
            memory = lm._memory(row)
            lm._fill(memory, row.tokens, ())
            early = Early(Memory(memory.slot, memory.cached), start, marks)
        known = len(early.parents)
        feeds.append(tree_feed(early.memory, (), tree.tokens[known:], tree.parents[known:]))
        open_trees.append(early)
    if any(feed.tokens for feed in feeds):
        ran = lm._run(feeds, taps(marks), Stage(0, start, head=False))
        for feed, early, (_, states) in zip(feeds, open_trees, ran, strict=True):
            if feed.tokens and states is not None:
                early.states.append(states)
    return open_trees


@torch.inference_mode()
def probe(view: CachedExits) -> float:
    """Largest error of a chain's logits, scored in two parts, against one forward over it."""
    lm = view.lm
    *prompt, last = some_tokens(6, lm.vocab_size, 0)
    nodes = (last, *some_tokens(3, lm.vocab_size, 1))
    tree = TokenTree(nodes, tuple(range(-1, len(nodes) - 1)))
    params = SamplingParams(max_new_tokens=8)
    row = DecodeState([*prompt, last], len(prompt) + 1, params, SeededCoins(0), None)
    lm.prefill(row)
    try:
        draft = Draft(tree, Draw.POINT)
        whole = lm.score([row], [draft])[0].logits.float()
        view.grow([row], [nodes[:2]], [tree.parents[:2]], [view.marks[-1]])
        return difference(lm.score([row], [draft])[0].logits, whole)
    finally:
        lm.free([row])


def upto(marks: Sequence[int], depth: int) -> tuple[int, ...]:
    return tuple(mark for mark in marks if mark <= depth)


def taps(marks: Sequence[int]) -> tuple[int, ...]:
    """The layers whose outputs these depths read."""
    return tuple(mark - 1 for mark in marks)
