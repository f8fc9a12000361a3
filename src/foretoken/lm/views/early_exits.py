"""Early exits of a CachedLM: its first layers draft, and its scoring goes on where they stopped.

Draft and target are one model with one cache. A drafted node leaves keys and values in the first
layers and its hidden state at the exit; when the tree is scored, only the layers behind the exit
run, and all of them for nodes nobody fed. A round of g drafted tokens costs g E + L layers
(LayerSkip, arXiv 2404.16710, section 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.errors import CapabilityError
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.packing import Memory, tree_feed
from foretoken.lm.runtime.partial_forwards import Stage
from foretoken.lm.runtime.probe import difference, probe_row, refused, some_tokens
from foretoken.lm.runtime.rounding import allowed
from foretoken.lm.runtime.sharing import exclusive
from foretoken.lm.views.layer_predictions import LayerPredictions
from foretoken.lm.views.view import TargetView
from foretoken.types import (
    DecodeState,
    Draft,
    Draw,
    FinalNorm,
    Layer,
    Ragged,
    Rows,
    Scores,
    Tap,
    Taps,
    TokenTree,
)

READ_AT_ONCE = 64  # states given to the head together: their logits are large, and read once


@dataclass(slots=True, eq=False)
class EarlyTree:
    """An open tree drafted by the first layers of the model that will score it."""

    memory: Memory  # of these layers: the row's own slot and columns
    depth: int  # layers
    marks: tuple[int, ...]  # depths whose outputs are kept, ascending, up to `depth`
    parents: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # of every call: [n, marks, H]

    def opens(self, tree: TokenTree, row: DecodeState) -> bool:
        """Whether a tree of `row` begins with these very nodes."""
        count = len(self.parents)
        return (
            list(tree.tokens[:count]) == self.memory.tokens
            and list(tree.parents[:count]) == self.parents
            and self.memory.cached == len(row.tokens) - 1
        )


class EarlyExits(TargetView):
    """Depth d is the first d layers, norm and head."""

    base: CachedLM

    def __init__(self, lm: LanguageModel, depths: tuple[int, ...]) -> None:
        super().__init__(lm)
        self.depths = depths  # that may be asked for, ascending
        self.head = self.base.stack.head()  # what norm and head cost, in layers
        self._open: dict[int, EarlyTree] = {}  # by row
        family = self.base.family
        asked = f"early exits of {family.name} were asked for."
        if family.switch is not None:
            raise CapabilityError(
                asked,
                f"longrope scales all positions of a call anew beyond {family.switch}, so work "
                "cannot be split between two calls.",
                "use method chain, prompt-lookup or plain.",
            )
        with refused(asked, "left early"):  # as where some read keys of others, not run before
            error = probe(self)
        if error > allowed(self.base.model.dtype):
            raise CapabilityError(
                asked,
                f"its layers run in two parts are off by {error:.0%} of the logits' spread.",
                "use method chain, prompt-lookup or plain.",
            )

    @exclusive
    def draft(
        self, rows: Rows, tokens: Ragged, parents: Ragged, depths: Sequence[int]
    ) -> list[Float[Tensor, "n V"]]:
        """Append nodes to the rows' early trees, each row at a depth of its own; their logits.

        The next `score` goes on where the early layers stopped, for a tree that begins with the
        nodes drafted, in the order they were drafted in.
        """
        feeds, trees = [], []
        for row, new, above, depth in zip(rows, tokens, parents, depths, strict=True):
            tree = self._opened(row, depth) if above[0] < 0 else self._tree(row)
            assert tree is not None, "nodes were appended to a tree that was never opened"
            assert tree.depth == depth, "a tree was gone on with at another depth"
            tree.parents += above
            feeds.append(tree_feed(tree.memory, (), new, above))
            trees.append(tree)
        marks = upto(self.depths, max(depths))
        exits = {tree.memory.slot: tree.depth for tree in trees}
        ran = self.base._run(feeds, outputs_of(marks), Stage(0, max(depths), exits=exits))
        for tree, score in zip(trees, ran, strict=True):
            assert score.hidden is not None
            tree.states.append(score.hidden[:, : len(tree.marks)])
        return [score.logits for score in ran]

    @exclusive
    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        """As the wrapped model, where early layers have seen the beginning of a tree.

        The rest starts at the shallowest exit of the batch, for one forward of all rows: what a row
        with a deeper exit computes twice costs arithmetic, and the weights are read once.
        """
        trees = [draft.tree for draft in drafts]
        begun = [self._tree(row) for row in rows]
        for i, row in enumerate(rows):
            early = begun[i]
            self._open.pop(row.uid, None)
            if early is not None and not early.opens(trees[i], row):
                begun[i] = None
        start = min((early.depth for early in begun if early is not None), default=0)
        marks = upto(self.depths, start)
        reach = [reach_of(tap, self.layers) for tap in taps]
        if not start or any(depth <= start and depth not in marks for depth in reach):
            return self.lm.score(rows, drafts, taps)
        outputs, entering = self._catch_up(rows, trees, begun, start)
        feeds = [
            tree_feed(self.base._memory(row), (), tree.tokens, tree.parents)
            for row, tree in zip(rows, trees, strict=True)
        ]
        late = tuple(tap for tap, depth in zip(taps, reach, strict=True) if depth > start)
        ran = self.base._run(feeds, late, Stage(start, self.layers, states=entering))
        whole = self.layers + self.head
        for score in ran:
            score.share = (whole - start) / whole
        if taps:
            known = [*marks, *(depth for depth in reach if depth > start)]
            places = [known.index(depth) for depth in reach]
            for output, score in zip(outputs, ran, strict=True):
                states = output if score.hidden is None else torch.cat([output, score.hidden], 1)
                score.hidden = states[:, places]
        return ran

    def free(self, rows: Rows) -> None:
        for row in rows:
            self._open.pop(row.uid, None)
        self.lm.free(rows)

    @exclusive
    def predictions(self, states: Sequence[Float[Tensor, "n L H"]]) -> list[LayerPredictions]:
        """What each layer would have said: the head over many states at once, in chunks."""
        flat = torch.cat([one.flatten(0, 1) for one in states])
        tokens, sure = [], []
        for chunk in torch.split(flat, READ_AT_ONCE):
            logits = self.base.read_out(chunk).float()
            best, token = logits.max(-1)
            tokens.append(token)
            sure.append((best - logits.logsumexp(-1)).exp())
        cut = [one.shape[0] * one.shape[1] for one in states]
        parts = torch.split(torch.cat(tokens), cut), torch.split(torch.cat(sure), cut)
        return [
            LayerPredictions(token.view(one.shape[:2]), p.view(one.shape[:2]))
            for token, p, one in zip(*parts, states, strict=True)
        ]

    def _opened(self, row: DecodeState, depth: int) -> EarlyTree:
        """A new tree at the row's last token, behind a cache that holds all others."""
        assert depth in self.depths, f"depth {depth} is none of the exits {self.depths}"
        tree = self._begin(row, depth)
        self._open[row.uid] = tree
        return tree

    def _begin(self, row: DecodeState, depth: int) -> EarlyTree:
        memory = self.base._memory(row)
        memory.forget()
        self.base._fill([row])
        return EarlyTree(Memory(memory.slot, memory.cached), depth, upto(self.depths, depth))

    def _tree(self, row: DecodeState) -> EarlyTree | None:
        """The row's open tree, in the slot where the row is now."""
        tree = self._open.get(row.uid)
        if tree is not None:
            tree.memory.slot = self.base._memory(row).slot
        return tree

    def _catch_up(
        self, rows: Rows, trees: Sequence[TokenTree], begun: Sequence[EarlyTree | None], start: int
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Feed the nodes that no draft has fed to the layers before `start`, without a head.

        What all nodes of each row left behind these layers: of the marks [N, marks, H], and by slot
        of the last one [N, H].
        """
        marks = upto(self.depths, start)
        early = [one or self._begin(row, start) for one, row in zip(begun, rows, strict=True)]
        feeds = [
            tree_feed(one.memory, (), tree.tokens[known:], tree.parents[known:])
            for one, tree in zip(early, trees, strict=True)
            for known in [len(one.parents)]
        ]
        if any(feed.tokens for feed in feeds):
            ran = self.base._run(feeds, outputs_of(marks), Stage(0, start, head=False))
            for feed, one, score in zip(feeds, early, ran, strict=True):
                if feed.tokens and score.hidden is not None:
                    one.states.append(score.hidden)
        outputs = [torch.cat([part[:, : len(marks)] for part in one.states]) for one in early]
        pairs = zip(early, outputs, strict=True)
        return outputs, {one.memory.slot: output[:, -1] for one, output in pairs}


@torch.inference_mode()
def probe(view: EarlyExits) -> float:
    """Largest error of a chain's logits, scored in two parts, against one forward over it."""
    *prompt, last = some_tokens(6, view.vocab_size, 0)
    nodes = (last, *some_tokens(3, view.vocab_size, 1))
    tree = TokenTree(nodes, tuple(range(-1, len(nodes) - 1)))
    row = probe_row([*prompt, last])
    view.prefill([row])
    try:
        draft = Draft(tree, Draw.POINT)
        whole = view.score([row], [draft])[0].logits.float()
        view.draft([row], [nodes[:2]], [tree.parents[:2]], [view.depths[-1]])
        return difference(view.score([row], [draft])[0].logits, whole)
    finally:
        view.free([row])


def reach_of(tap: Tap, layers: int) -> int:
    """Layers behind which a tap reads; the last norm lies behind them all."""
    if isinstance(tap, Layer):
        return tap.index % layers + 1
    return layers + 1 if isinstance(tap, FinalNorm) else 0


def upto(marks: Sequence[int], depth: int) -> tuple[int, ...]:
    return tuple(mark for mark in marks if mark <= depth)


def outputs_of(marks: Sequence[int]) -> Taps:
    """Taps of the layers whose outputs these depths read."""
    return tuple(Layer(mark - 1) for mark in marks)
