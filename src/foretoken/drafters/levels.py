"""What drafters share that draw a tree level by level with a draft model.

One draft forward per level over all rows that still draft; what was accepted stays in the draft
model's cache. Above temperature 0 children are drawn from the row's own warp of the draft model's
logits, and whether a node gets another child is decided before that child is drawn, from draws
made earlier. That alone keeps the law: the next child of a node, whenever it comes, is distributed
as the next draw at that node, which is all that a rule for drawn siblings asks for.

At temperature 0 the candidates are fixed (POINT) and ranked by the draft model's law as it stands
before the temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foretoken.asking import LAST, taps_of, wants_branches
from foretoken.coins import Coins
from foretoken.drafters.rows import RowDrafter
from foretoken.errors import ConfigError
from foretoken.trees.build import root
from foretoken.trees.mixed import best_and_rest
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    KeepGoing,
    LanguageModel,
    Scores,
    TokenTree,
    Verdict,
)
from foretoken.warp import Warp


@dataclass(slots=True, eq=False)
class Growth:
    """One row's tree while it grows; lists run over its nodes, root first."""

    row: DecodeState
    warp: Warp  # makes the laws that children are drawn from, or ranked by
    widths: tuple[int, ...]  # what each level may have: its meaning is the drafter's
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    laws: list[Tensor | None] = field(default_factory=lambda: [None])  # [V] of the children
    mass: list[float] = field(default_factory=lambda: [1.0])  # the draft's law of the whole path
    fed: list[int] = field(default_factory=lambda: [-1])  # place in the draft model's open tree
    frontier: list[int] = field(default_factory=lambda: [0])  # nodes to be fed next
    beam: list[int] = field(default_factory=lambda: [0])  # for drafters that keep one
    level: int = 0
    count: int = 0  # nodes fed

    @property
    def width(self) -> int:
        """What the level under way may have."""
        return self.widths[self.level]

    def feed_tokens(self) -> list[int]:
        return [self.tokens[node] for node in self.frontier]

    def feed_parents(self) -> list[int]:
        return [self.fed[self.parents[node]] if node else -1 for node in self.frontier]

    def add(self, token: int, parent: int, chance: float = 1.0) -> int:
        """A new node, drawn with `chance` after its parent."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.laws.append(None)
        self.mass.append(self.mass[parent] * chance)
        self.fed.append(-1)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to `node`."""
        found: list[int] = []
        while node > 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def read(self, logits: Tensor) -> dict[int, Tensor]:
        """The laws [V] after the nodes just fed; nodes that nothing may follow have none."""
        for node in self.frontier:
            self.fed[node] = self.count
            self.count += 1
        if not self.warp.path_dependent:
            laws = self.warp.probabilities(self.warp.biased(logits))
            return dict(zip(self.frontier, laws, strict=True))
        found = {}
        for node, scored in zip(self.frontier, logits, strict=True):
            try:
                found[node] = self.warp.law(self.row.tokens, scored, self.path(node))
            except ConfigError:  # the options forbid everything here; the target may not come by
                continue
        return found

    def descend(self, born: int) -> bool:
        """Go to the level that begins at node `born`; False when nothing has to be fed any more."""
        eos = self.row.params.eos
        self.frontier = [n for n in range(born, len(self.tokens)) if self.tokens[n] not in eos]
        self.level += 1
        return bool(self.frontier) and self.level < len(self.widths)

    def tree(self) -> TokenTree:
        return TokenTree(tuple(self.tokens), tuple(self.parents))


class LevelDrafter(RowDrafter):
    """Base of tree drafters: override `levels` (the shape) and `spawn` (a level's children)."""

    trees = True
    memoryless = True
    kind: Draw  # of children above temperature 0

    def __init__(self, draft_lm: LanguageModel) -> None:
        self.lm = self.hidden_from = draft_lm

    def levels(self, budget: Budget) -> tuple[int, ...]:
        """What each level of a draft may have under `budget`."""
        raise NotImplementedError

    def spawn(self, growth: Growth, laws: dict[int, Tensor]) -> None:
        """Add the children of the nodes just fed, and keep the laws they were drawn from."""
        raise NotImplementedError

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        # A prompt beyond the draft model's positions is decoded plainly; see `allowed`.
        if self.lm.max_length is None or len(row.tokens) <= self.lm.max_length:
            self.lm.prefill(row)
        row.draft = _RowState(ranking(row, self.lm.vocab_size) if row.warp.greedy else row.warp)

    def propose(
        self, rows: Sequence[DecodeState], budgets: Sequence[Budget], keep_going: KeepGoing
    ) -> list[Draft]:
        growing: list[Growth] = []
        for row, budget in zip(rows, budgets, strict=True):
            state: _RowState = row.draft
            widths = self.levels(self.allowed(row, budget))
            state.growth = Growth(row, state.warp, widths, [row.tokens[-1]]) if widths else None
            if state.growth is not None:
                growing.append(state.growth)
        self.complete(growing, keep_going)
        return [self.draft(row) for row in rows]

    def complete(self, growing: list[Growth], keep_going: KeepGoing) -> None:
        """Level after level, one draft forward each, until no tree grows any more."""
        taps = taps_of(keep_going)
        while growing:
            rows = [growth.row for growth in growing]
            tokens = [growth.feed_tokens() for growth in growing]
            parents = [growth.feed_parents() for growth in growing]
            if taps:
                scores = self.lm.grow_scores(rows, tokens, parents, taps)
            else:
                scores = [Scores(logits) for logits in self.lm.grow(rows, tokens, parents)]
            growing = [
                growth
                for growth, score in zip(growing, scores, strict=True)
                if self.level(growth, score, keep_going)
            ]

    def level(self, growth: Growth, score: Scores, keep_going: KeepGoing) -> bool:
        """One level more, if `keep_going`, asked before any coin, allows it; False when the tree
        is complete.
        """
        laws = self.bearing(growth, growth.read(score.logits))
        answer = asked(growth, laws, score.hidden, keep_going) if laws else 0
        if not answer:
            return False
        born = len(growth.tokens)
        self.spawn(growth, laws)
        return growth.descend(born) and answer != LAST

    def bearing(self, growth: Growth, laws: dict[int, Tensor]) -> dict[int, Tensor]:
        """Those of the nodes just fed that get children."""
        return laws

    def allowed(self, row: DecodeState, budget: Budget) -> Budget:
        """The budget within the draft model's positions; nodes of the last level are never fed."""
        depth = budget.depth
        if self.lm.max_length is not None:
            depth = min(depth, self.lm.max_length - len(row.tokens) + 1)
        return Budget(max(depth, 0), budget.nodes)

    def draft(self, row: DecodeState) -> Draft:
        growth: Growth | None = row.draft.growth
        point = row.warp.greedy
        kind = Draw.POINT if point else self.kind
        if growth is None:
            return Draft(root(row.tokens[-1]), kind, None if point else (None,))
        return Draft(growth.tree(), kind, None if point else tuple(growth.laws))

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        opened, paths = [], []
        for row, verdict in zip(rows, verdicts, strict=True):
            growth: Growth | None = row.draft.growth
            if growth is None or row.finish is not None:
                continue
            opened.append(row)
            # Of an accepted path only the last node can be one that was never fed.
            paths.append([growth.fed[node] for node in verdict.path if growth.fed[node] > 0])
            row.draft.growth = None
        if opened:
            self.lm.commit(opened, paths)

    def finish(self, row: DecodeState) -> None:
        self.lm.free([row])


@dataclass(slots=True)
class _RowState:
    warp: Warp
    growth: Growth | None = None


def asked(
    growth: Growth, laws: dict[int, Tensor], hidden: Tensor | None, keep_going: KeepGoing
) -> int:
    """The controller's answer about the next level: to the law of its first branch, or of all.

    `hidden` [n L H] runs over the nodes fed; nodes that bear no children are left out.
    """
    if not wants_branches(keep_going):
        return keep_going(growth.row, next(iter(laws.values())))
    stacked = torch.stack(list(laws.values()))
    if hidden is None:
        return keep_going(growth.row, stacked)
    return keep_going(growth.row, stacked, hidden[[growth.frontier.index(n) for n in laws]])


def ranking(row: DecodeState, vocab_size: int) -> Warp:
    """The row's options without temperature and cuts: what fixed candidates are ranked by."""
    params = replace(row.params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    warp = Warp(params, row.prompt_len, vocab_size)
    warp.follow(row.tokens)
    return warp


def independent(law: Tensor, count: int, coins: Coins) -> list[int]:
    """`count` draws, which may repeat themselves."""
    return [coins.draw(law) for _ in range(count)]


def distinct(law: Tensor, count: int, coins: Coins) -> list[int]:
    """Up to `count` different tokens, each drawn from what the ones before left of `law`.

    The law of this list is that of the `count` largest of log q + Gumbel noise, in their order.
    """
    drawn: list[int] = []
    left: Tensor | None = law
    while left is not None and len(drawn) < count:
        drawn.append(coins.draw(left))
        left = without(left, drawn[-1]) if len(drawn) < count else None
    return drawn


def best_and_drawn(law: Tensor, count: int, coins: Coins) -> tuple[list[int], Tensor]:
    """The `count` - 1 likeliest tokens and one drawn from the rest, and the law of that rest."""
    best, rest = best_and_rest(law, count - 1)
    return (best + [coins.draw(rest)] if float(rest.sum()) > 0.0 else best), rest


def without(law: Tensor, token: int) -> Tensor | None:
    """`law` given that it is not `token`; None where nothing else is possible."""
    rest = law.clone()
    rest[token] = 0.0
    mass = rest.sum()
    return rest / mass if float(mass) > 0.0 else None


def likeliest(law: Tensor, count: int) -> list[int]:
    """The `count` best tokens that are possible at all."""
    best, ids = law.topk(min(count, law.shape[-1]))
    return [t for p, t in zip(best.tolist(), ids.tolist(), strict=True) if p > 0.0]
