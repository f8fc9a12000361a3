"""Leaving the stack early: the target's own forward ends once a rule is sure of what it will say
(SpecEE, arXiv 2504.08850). Lossy: the text follows an intermediate layer.

A forward that ended early has filled the first layers' cache only. The tokens it wrote therefore
count as not cached, and the next forward feeds them again along with its own: the cache is always
what the whole model makes of the text, for the price of a few more tokens in a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.contract import LanguageModel
from foretoken.errors import CapabilityError
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.captured import Call, Captured, Cut, end_of
from foretoken.lm.runtime.packing import Feed, tree_feed
from foretoken.lm.runtime.partial_forwards import Forward, Stack
from foretoken.lm.runtime.sharing import exclusive
from foretoken.lm.views.view import TargetView
from foretoken.types import DecodeState, Draft, Ragged, Rows, Scores, Taps, TokenTree

Judge = Callable[[int, Float[Tensor, "n F"]], list[bool]]  # layer and features to yes or no
NORMS = ("norm", "final_layer_norm", "ln_f", "final_layernorm")


@dataclass(slots=True, eq=False)
class Leave:
    """One row's wish to leave early, and the rule that decides.

    An exit is confirmed by an argmax of logits, so this is for rows that take just that token.
    """

    candidates: Int[Tensor, "N K"]  # per node of the tree: what is likely to follow it
    active: frozenset[int]  # layers behind which the rule is asked
    judge: Judge
    tree: TokenTree
    depth: int = 0  # layers that made the logits, once known
    before: Tensor | None = field(default=None)  # [N, K] laws behind the last layer asked about

    def asks(self, layer: int, scores: Float[Tensor, "N K"], full: Callable[[], list[int]]) -> bool:
        """Whether the whole accepted path is settled behind `layer`.

        A path is one hyper-token: it is settled when the rule fires at each of its nodes and each
        node's most likely token, of the whole vocabulary, is a candidate or a child. So the latest
        node decides, and the price of asking grows with the depth of a tree, not with its leaves.
        """
        seen, self.before = features(scores, self.before)
        fires = self.judge(layer, seen)
        if not fires[0]:
            return False
        best, node, children = full(), 0, self.tree.children()
        while fires[node]:
            token = best[node]
            below = [child for child in children[node] if self.tree.tokens[child] == token]
            if not below:
                return token in self.candidates[node].tolist()
            node = below[0]
        return False


def features(
    scores: Float[Tensor, "N K"], before: Float[Tensor, "N K"] | None
) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N K"]]:
    """What a predictor reads of the candidates' logits, and their law.

    Beside logits and law it is how the law changed since the layer that was asked `before`.
    """
    law = scores.softmax(-1)
    change = law if before is None else law - before
    return torch.cat([scores, law, change], -1), law


class Gate:
    """A forward that ends behind the first layer where all its rows have left."""

    head = True

    def __init__(self, readout: Readout, leaves: dict[int, Leave], layers: int) -> None:
        self.readout, self.leaves, self.layers = readout, leaves, layers
        self.ran = 0  # layers of the forward so far
        self.depths: dict[int, int] = {}  # that a row's forward ran; not all need be in one

    def entered(
        self, stack: Stack, feeds: Sequence[Feed], width: int
    ) -> AbstractContextManager[None]:
        self.feeds, self.states = feeds, dict[int, Tensor]()
        self.ran, self.ended = 0, False
        return stack.shadowed({i: self.forward(stack, i) for i in range(self.layers)})

    def run(self, lean: Captured, call: Call) -> list[Tensor]:
        """The same of a captured model, from one layer that is asked to the next."""
        self.feeds, self.states, self.ran = call.batch.feeds, dict[int, Tensor](), 0
        asked = {layer for leave in self.leaves.values() for layer in leave.active}
        stops = sorted({layer + 1 for layer in asked if layer + 1 < self.layers} | {self.layers})
        output: Tensor | None = None
        for stop in stops:
            [output] = call.run(lean, Cut(self.ran, stop, head=False), output)
            self.ran = stop
            self.look(stop - 1, output)
            if len(self.states) == len(self.feeds):
                break
        self.note()
        assert output is not None
        mixed = torch.stack([self.states.get(i, one) for i, one in enumerate(output)])
        return call.run(lean, Cut(self.layers, self.layers), mixed)

    def forward(self, stack: Stack, index: int) -> Forward:
        """Layer `index`, unless all rows have left before it."""
        run, passing = stack.layers[index].forward, stack.passing(index)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.ended:
                return passing(*args, **kwargs)
            output = run(*args, **kwargs)
            self.ran = index + 1
            self.note()
            states = output[0] if stack.tuples[index] else output
            self.look(index, states)
            self.ended = len(self.states) == len(self.feeds)
            if self.ended or index == self.layers - 1:
                mixed = torch.stack([self.states.get(i, one) for i, one in enumerate(states)])
                return (mixed,) if stack.tuples[index] else mixed
            return output

        return forward

    def note(self) -> None:
        """How far the rows of this forward went."""
        self.depths.update(dict.fromkeys([feed.memory.slot for feed in self.feeds], self.ran))

    def look(self, layer: int, states: Float[Tensor, "B Q H"]) -> None:
        """Ask every row that is still inside whether it leaves here."""
        for i, feed in enumerate(self.feeds):
            leave = self.leaves.get(feed.memory.slot)
            if leave is None or i in self.states:
                continue
            leave.depth = layer + 1
            if layer not in leave.active or layer == self.layers - 1:
                continue
            stop = len(feed.tokens)
            normed = self.readout.norm(states[i, stop - feed.scored : stop])
            scores = self.readout.some(normed, leave.candidates)
            if leave.asks(layer, scores, lambda normed=normed: self.readout.best(normed)):  # type: ignore[misc]
                self.states[i] = states[i].clone()


class Readout:
    """The last norm and the head of a model, for a few tokens of the vocabulary or for all."""

    def __init__(self, lm: CachedLM) -> None:
        decoder = lm._decoder
        found = [getattr(decoder, name) for name in NORMS if hasattr(decoder, name)]
        if not found or lm.family.switch is not None:
            raise CapabilityError(
                f"leaving the layers of {lm.family.name} early was asked for.",
                "its last norm could not be found, or its positions are scaled by the call.",
                "use method chain, prompt-lookup or plain.",
            )
        self.lm, self.norm = lm, found[0]

    @property
    def head(self) -> nn.Module:
        """The output layer that the model has now: its owner may put another in."""
        found: nn.Module = self.lm.model.get_output_embeddings()
        return found

    def some(self, normed: Float[Tensor, "n H"], tokens: Int[Tensor, "n K"]) -> Tensor:
        """Logits [n, K] of some tokens per state, before any scaling the family applies."""
        rows = F.embedding(tokens, self.head.weight)  # type: ignore[arg-type]
        return (rows @ normed[..., None])[..., 0].float()

    def best(self, normed: Float[Tensor, "n H"]) -> list[int]:
        """The most likely token of the whole vocabulary per state."""
        lean = self.lm.lean
        logits = self.head(normed) if lean is None else end_of(lean, normed, lean.layers + 1)
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen


class EarlyExitScoring(TargetView):
    """A target whose scoring may end before its last layer, where a row's wish says so."""

    lossless = False
    base: CachedLM

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(lm)
        self.readout = Readout(self.base)
        self._wishes: dict[int, Leave] = {}  # by row, for its next scores
        self._partial: set[int] = set()  # rows whose open tree was scored by some layers only

    def leave(self, row: DecodeState, wish: Leave) -> None:
        """The row's next scores may leave early."""
        wish.candidates = wish.candidates.to(self.base.device)
        self._wishes[row.uid] = wish

    @exclusive
    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        """Score trees by a forward that ends as soon as all rows may leave."""
        memories = [self.base._memory(row) for row in rows]
        wishes = {
            memory.slot: self._wishes.pop(row.uid)
            for row, memory in zip(rows, memories, strict=True)
            if row.uid in self._wishes
        }
        self._partial -= {row.uid for row in rows}
        if not wishes or taps:
            return self.lm.score(rows, drafts, taps)
        feeds = []
        for row, memory, draft in zip(rows, memories, drafts, strict=True):
            memory.forget()
            behind = row.tokens[memory.cached : -1]
            feeds.append(tree_feed(memory, behind, draft.tree.tokens, draft.tree.parents))
        known = [memory.cached for memory in memories]
        gate = Gate(self.readout, wishes, self.layers)
        ran = self.base._run(feeds, (), gate)
        whole = self.layers + self.base.stack.head()
        for row, memory, cached, score in zip(rows, memories, known, ran, strict=True):
            depth = gate.depths[memory.slot]
            score.share = (depth + whole - self.layers) / whole
            if depth < self.layers:  # the other layers know nothing of them: they are fed again
                memory.cached = cached
                self._partial.add(row.uid)
        return ran

    @exclusive
    def commit(self, rows: Rows, paths: Ragged) -> None:
        """As the wrapped model; of trees that only some layers have seen nothing is kept."""
        whole = [(r, p) for r, p in zip(rows, paths, strict=True) if r.uid not in self._partial]
        for row in rows:
            if row.uid in self._partial:
                self.base._memory(row).forget()
        self._partial -= {row.uid for row in rows}
        if whole:
            self.lm.commit([row for row, _ in whole], [path for _, path in whole])

    def free(self, rows: Rows) -> None:
        for row in rows:
            self._wishes.pop(row.uid, None)
            self._partial.discard(row.uid)
        self.lm.free(rows)
