"""The target's own law gives the first layer of a tree (improved MCSD, arXiv 2409.10644).

What the target says after the last committed token is known from the scoring before, so W
candidates of the first layer are drawn from it without a draft forward, and none of them can be
wrong. Which of them is kept is decided by how long its guesses survive, and that favours some: the
text follows the target's law for W = 1 only.

A step of this method ends at a node whose law is known and commits nothing drawn from it; the
first step of a row, and any step behind a token nobody has scored, drafts an ordinary chain.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foretoken.drafters.growers.grower import Growth, Opened
from foretoken.drafters.growers.levels import distinct, likeliest
from foretoken.drafters.growers.sampled_tree import FixedShape, Form, SampledGrowth
from foretoken.drafters.growers.tree_growth import ranking
from foretoken.trees.build import root
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Scores,
    Shape,
    Step,
    Traits,
    Verdict,
)
from foretoken.warp.residual import residual


@dataclass(slots=True)
class KnownNext(Opened):
    """A row, and the law of its next token where that is known."""

    judged: tuple[Draft, Scores, Verdict] | None = None  # of the last step, not yet looked at
    pending: Tensor | None = None  # [V] of the target


class TargetGrowth(SampledGrowth):
    """One row's tree whose first layer is the target's own."""

    def __init__(self, row: DecodeState, widths: tuple[int, ...], law: Tensor) -> None:
        super().__init__(row, widths, Draw.TARGET)
        first = likeliest(law, widths[0]) if self.greedy else distinct(law, widths[0], row.coins)
        self.laws[0] = law
        below = [self.add(token, 0) for token in first]
        self.frontier += [node for node in below if self.tokens[node] not in row.params.eos]
        self.level = 1
        self.complete = len(widths) == 1 or len(self.frontier) == 1  # or every candidate is an end

    def read(self, logits: Tensor) -> tuple[list[int], Tensor]:
        nodes, laws = super().read(logits)
        if nodes and nodes[0] == 0:  # the root has the target's candidates already
            return nodes[1:], laws[1:]
        return nodes, laws


class TargetFirst(FixedShape):
    """k = (W, k1, ..., kL): W tokens of the target, below each of them a tree of the draft's."""

    FORM: Form = (2, 4, 4, 1, 1)
    kind = Draw.TARGET
    # Ordinary chains of a row's first step included: no other rule goes on from where they end.
    traits = Traits(frozenset({Draw.TARGET}), Shape.TREE)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        # W, then children of every node by depth, or W alone for W chains; None: (2, 4, 4, 1, 1),
        # or 4 chains for mcsd-dynamic, narrowed to the budget
        k: Form | None = None

    def opened(self, row: DecodeState) -> Opened:
        return KnownNext()

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        widths, law = self.levels(depth, budget.nodes), self.known(row)
        if law is not None:
            return TargetGrowth(row, widths, law)
        kind = Draw.POINT if row.warp.greedy else Draw.IID
        return SampledGrowth(row, (1,) * len(widths), kind)

    def undrafted(self, row: DecodeState) -> Draft:
        law = self.known(row)
        if law is None:
            return super().undrafted(row)
        # The law may not be drawn from twice: the verifier has to have it.
        return Draft(root(row.tokens[-1]), Draw.TARGET, (law,))

    def known(self, row: DecodeState) -> Tensor | None:
        """The law of the row's next token. Asked while proposing, not before: it may run a caller's
        processor, and an exception there ends that row alone.
        """
        state: KnownNext | None = row.private.get(self)
        if state is None:
            return None
        if state.judged is not None:
            state.pending = law_after(row, *state.judged)
            state.judged = None
        return state.pending

    def observe(self, step: Step) -> None:
        judged = zip(step.rows, step.drafts, step.scores, step.verdicts, strict=True)
        for row, draft, score, verdict in judged:
            state: KnownNext | None = row.private.get(self)
            if state is not None and row.finish is None:
                state.judged = draft, score, verdict
        super().observe(step)


class TargetFork(TargetFirst):
    """W chains, one below each token of the target: the form whose depth a controller chooses.

    Nodes lie level by level, so a tree that stopped early is the beginning of the whole one, and
    its mask the upper left part of the whole one's.
    """

    FORM = 4  # W; the paper's runs have 4 to 24
    DEPTH = 6  # the first layer and the paper's five drafted ones


def law_after(row: DecodeState, draft: Draft, score: Scores, verdict: Verdict) -> Tensor | None:
    """What the next token has to follow: the target's law, or what a rejection leaves of it."""
    tree = draft.tree
    last = verdict.path[-1] if verdict.path else 0
    children = tree.children()
    found = [n for n in children[last] if tree.tokens[n] == verdict.next_token]
    if not found:
        return None
    node = found[0]
    # The row's text has grown up to this node: options count its tokens once, not as a path, too.
    if row.warp.greedy:  # candidates rank by the law before the temperature
        return ranking(row).law(row.tokens, score.logits[node])
    p: Tensor = row.warp.law(row.tokens, score.logits[node])
    if not children[node] or draft.q is None:
        return p
    q = draft.q[node]
    assert q is not None, "children have a law"
    left = residual(p, q)
    return p if left is None else left
