"""The target's own law gives the first layer of a tree (improved MCSD, arXiv 2409.10644).

What the target says after the last committed token is known from the scoring before, so W
candidates of the first layer are drawn from it without a draft forward, and none of them can be
wrong. Which of them is kept is decided by how long its guesses survive, and that favours some: the
text follows the target's law for W = 1 only.

A step of this method ends at a node whose law is known and commits nothing drawn from it; the
first step of a row, and any step behind a token nobody has scored, drafts an ordinary chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.drafters.levels import Growth, distinct, likeliest
from foretoken.drafters.sampled_tree import FixedShape, Form
from foretoken.trees.build import root
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    KeepGoing,
    LanguageModel,
    Scores,
    Verdict,
)
from foretoken.warp import Warp


@dataclass(slots=True)
class _RowState:
    warp: Warp
    growth: Growth | None = None
    pending: Tensor | None = None  # [V] the target's law after the last token, where it is known


class TargetFirst(FixedShape):
    """k = (W, k1, ..., kL): W tokens of the target, below each of them a tree of the draft's."""

    memoryless = False
    FORM: Form = (2, 4, 4, 1, 1)  # where none was told

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        # W, then children of every node by depth, or W alone for W chains; None: (2, 4, 4, 1, 1),
        # or 4 chains for mcsd-dynamic, narrowed to the budget
        k: Form | None = None

    def __init__(self, draft_lm: LanguageModel, config: Config | None = None) -> None:
        self.config = config or self.Config()
        super().__init__(draft_lm, self.config.k, self.FORM, Draw.DISTINCT)
        # IID chains are ordinary drafts; DISTINCT says that the first layer is the target's.
        self.draws = frozenset({Draw.IID, Draw.POINT, Draw.DISTINCT})

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        super().start(row, seen)
        row.draft = _RowState(row.draft.warp)

    def propose(
        self, rows: Sequence[DecodeState], budgets: Sequence[Budget], keep_going: KeepGoing
    ) -> list[Draft]:
        growing: list[Growth] = []
        for row, budget in zip(rows, budgets, strict=True):
            state: _RowState = row.draft
            state.growth = self.begin(row, state, self.levels(self.allowed(row, budget)))
            if state.growth is not None and state.growth.level < len(state.growth.widths):
                growing.append(state.growth)
        self.complete(growing, keep_going)
        return [self.draft(row) for row in rows]

    def begin(self, row: DecodeState, state: _RowState, widths: tuple[int, ...]) -> Growth | None:
        """The root, with the target's candidates below it where its law is known."""
        if not widths:
            return None
        law = state.pending
        if law is None:
            return Growth(row, state.warp, (1,) * len(widths), [row.tokens[-1]])
        growth = Growth(row, state.warp, widths, [row.tokens[-1]])
        greedy = row.warp.greedy
        first = likeliest(law, widths[0]) if greedy else distinct(law, widths[0], row.coins)
        growth.laws[0] = law
        below = [growth.add(token, 0) for token in first]
        growth.level, growth.fed[0] = 1, 0
        growth.frontier = [0, *(n for n in below if growth.tokens[n] not in row.params.eos)]
        if len(growth.frontier) == 1:
            growth.level = len(widths)  # every candidate ends the text
        return growth

    def bearing(self, growth: Growth, laws: dict[int, Tensor]) -> dict[int, Tensor]:
        first = growth.laws[0]  # the root has the target's candidates already
        return {n: law for n, law in laws.items() if n or first is None}

    def draft(self, row: DecodeState) -> Draft:
        state: _RowState = row.draft
        growth, law = state.growth, state.pending
        if growth is None:  # the law may not be drawn from twice: the verifier has to have it
            tree = root(row.tokens[-1])
            return Draft(tree, Draw.POINT) if law is None else Draft(tree, Draw.DISTINCT, (law,))
        if law is not None:
            return Draft(growth.tree(), Draw.DISTINCT, tuple(growth.laws))
        if row.warp.greedy:
            return Draft(growth.tree(), Draw.POINT)
        return Draft(growth.tree(), Draw.IID, tuple(growth.laws))

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        for row, draft, score, verdict in zip(rows, drafts, scores, verdicts, strict=True):
            state: _RowState = row.draft
            if row.finish is None:
                state.pending = self.law_after(row, state, draft, score, verdict)
            if state.growth is not None and state.growth.count == 0:
                state.growth = None  # the draft model was not asked
        super().observe(rows, drafts, scores, verdicts)

    def law_after(
        self, row: DecodeState, state: _RowState, draft: Draft, score: Scores, verdict: Verdict
    ) -> Tensor | None:
        """What the next token has to follow: the target's law, or what a rejection leaves of it."""
        tree = draft.tree
        last = verdict.path[-1] if verdict.path else 0
        children = tree.children()
        found = [n for n in children[last] if tree.tokens[n] == verdict.next_token]
        if not found:
            return None
        node = found[0]
        if row.warp.greedy:  # candidates rank by the law before the temperature
            path = [tree.tokens[n] for n in tree.path(node)]
            before = row.tokens[: len(row.tokens) - len(path)]
            return state.warp.law(before, score.logits[node], path)
        assert score.p is not None
        p = score.p[node]
        if not children[node] or draft.q is None:
            return p
        q = draft.q[node]
        assert q is not None, "children have a law"
        left = (p - q).clamp_min(0.0)
        mass = left.sum()
        return left / mass if float(mass) > 0.0 else p


class TargetFork(TargetFirst):
    """W chains, one below each token of the target: the form whose depth a controller chooses.

    Nodes lie level by level, so a tree that stopped early is the beginning of the whole one, and
    its mask the upper left part of the whole one's.
    """

    FORM = 4  # W; the paper's runs have 4 to 24
    DEPTH = 6  # the first layer and the paper's five drafted ones
