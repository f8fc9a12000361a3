"""A draft model grows a tree of likely continuations, best first (OPT-Tree, arXiv 2406.17276).

The value V of a node is the product of the draft's probabilities along its path. V never grows
downwards, so the n largest values form a prefix-closed tree, and that tree has the largest expected
number of accepted tokens of all trees of n nodes. One draft forward per level scores those nodes of
the level that are among the n best so far. The draft is POINT: its laws only rank. Where the
budget names prices, a level or a node is drafted only if its value pays for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.drafters.rows import RowDrafter
from foretoken.errors import ConfigError
from foretoken.trees.build import root
from foretoken.trees.templates import Form, Template
from foretoken.trees.worth import Decline, Trust, cheapest, paying
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

FEED = 0.25  # share of a forward's price that feeding one more node to it may cost


class TreeModel(RowDrafter):
    """Best-first growth under a node budget, or a static template of ranks."""

    trees = True
    valued = True

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        branch: int = 8  # children considered per node
        min_gain: float = 0.05  # no further level once it can add fewer expected tokens than this
        calibrate: bool = True  # correct the draft's confidence by what was accepted of it
        # None grows trees; (3, 2, 1) gives every node of a depth that many children;
        # ((0,), (1,), (0, 0)) lists paths of ranks, as Medusa's and Sequoia's files do
        template: Form | None = None

    def __init__(self, draft_lm: LanguageModel, config: Config | None = None) -> None:
        self.lm = draft_lm
        self.config = config or self.Config()
        if self.config.branch < 1:
            raise ConfigError(
                f"branch={self.config.branch} was asked for.",
                "branch is 1 or more children per node.",
                "pass branch=8 or leave it out.",
            )
        self.shape = None if self.config.template is None else Template(self.config.template)
        self.trust = Trust()
        self.decline = Decline()

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        # A prompt beyond the draft model's positions is decoded plainly; see `allowed`.
        if self.lm.max_length is None or len(row.tokens) <= self.lm.max_length:
            self.lm.prefill(row)
        params = row.params
        if params.temperature == 0.0:
            # At temperature 0 the warp is a point mass; candidates rank by the law before it.
            params = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        warp = Warp(params, row.prompt_len, self.lm.vocab_size)
        warp.follow(row.tokens)
        row.draft = _RowState(warp)

    def propose(
        self, rows: Sequence[DecodeState], budgets: Sequence[Budget], keep_going: KeepGoing
    ) -> list[Draft]:
        growing = []
        for row, budget in zip(rows, budgets, strict=True):
            state: _RowState = row.draft
            depth = self.allowed(row, budget)
            state.growth = Growth(row, state.warp, depth, budget) if depth > 0 else None
            if state.growth is not None:
                growing.append(state.growth)
        while growing:
            logits = self.lm.grow(
                [growth.row for growth in growing],
                [growth.feed_tokens() for growth in growing],
                [growth.feed_parents() for growth in growing],
            )
            growing = [
                growth
                for growth, scored in zip(growing, logits, strict=True)
                if growth.level(scored, self, keep_going)
            ]
        return [self.cut(row) for row in rows]

    def allowed(self, row: DecodeState, budget: Budget) -> int:
        """Levels that may be drafted; nodes of the last one are never fed."""
        depth = min(budget.depth, budget.nodes)
        if self.lm.max_length is not None:
            depth = min(depth, self.lm.max_length - len(row.tokens) + 1)
        return depth

    def cut(self, row: DecodeState) -> Draft:
        """The best nodes of the row's growth as a draft."""
        state: _RowState = row.draft
        if state.growth is None:
            return Draft(root(row.tokens[-1]), Draw.POINT)
        return Draft(state.growth.finish(), Draw.POINT)

    def values(self, row: DecodeState) -> list[float]:
        """The chance of every node of the row's draft, the root's first."""
        growth = row.draft.growth
        return [1.0] if growth is None else [node.value for node in growth.kept]

    def keep(self, row: DecodeState, nodes: Sequence[int]) -> None:
        """Only these nodes of the row's draft, the root among them, go to the target."""
        growth = row.draft.growth
        if growth is not None:
            growth.kept = [growth.kept[node] for node in nodes]

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
            if self.config.calibrate and self.shape is None:
                growth.teach(self.trust, verdict.path)
            fed = [growth.kept[node].fed for node in verdict.path]
            opened.append(row)
            paths.append([node for node in fed if node > 0])  # fed nodes are prefix-closed
            row.draft.growth = None
        if opened:
            self.lm.commit(opened, paths)

    def finish(self, row: DecodeState) -> None:
        self.lm.free([row])


@dataclass(slots=True)
class _RowState:
    warp: Warp
    growth: Growth | None = None


@dataclass(slots=True, eq=False)
class Node:
    """A candidate: its value, where it hangs, and where it lies in the draft model's open tree."""

    token: int
    parent: Node | None
    depth: int
    law: float  # the draft's probability of it given its parent
    value: float
    rank: int = 0  # among its siblings
    order: int = 0  # of creation
    fed: int = -1  # index in the open tree; -1: not fed
    ranks: tuple[int, ...] = ()  # its path in ranks, kept for templates only


class Growth:
    """One row's tree while it grows."""

    __slots__ = ("best", "budget", "created", "depth", "fed", "floor", "frontier", "gain",
                 "kept", "level_price", "node_prices", "paid", "row", "warp", "worth")  # fmt: skip

    def __init__(self, row: DecodeState, warp: Warp, depth: int, budget: Budget) -> None:
        self.row, self.warp, self.depth, self.budget = row, warp, depth, budget.nodes
        self.level_price, self.node_prices = budget.level_price, budget.node_prices
        # No node below its cheapest price can ever pay.
        self.floor = cheapest(budget.node_prices)
        top = Node(row.tokens[-1], None, 0, 1.0, 1.0, fed=0)
        self.frontier = [top]  # nodes fed to the draft model next
        self.best: list[Node] = []  # the `budget` best so far, largest value first
        self.kept: list[Node] = [top]  # the final tree in node order
        self.fed = 0
        self.created = 0
        self.paid = 0  # of the best, the nodes that pay
        self.worth = 0.0  # expected tokens above their price
        self.gain = 0.0  # what the last level added to it

    def feed_tokens(self) -> list[int]:
        return [node.token for node in self.frontier]

    def feed_parents(self) -> list[int]:
        return [-1 if node.parent is None else node.parent.fed for node in self.frontier]

    def level(self, logits: Tensor, drafter: TreeModel, keep_going: KeepGoing) -> bool:
        """Take in the children of the nodes just fed; False when the tree is complete."""
        parents = self.frontier
        for node in parents:
            node.fed = self.fed
            self.fed += 1
        laws = self.laws(logits)  # [n, V], best node first
        if not keep_going(self.row, laws[0]):
            return False
        width = min(drafter.config.branch, laws.shape[-1])
        if drafter.shape is not None:
            width = min(drafter.shape.width, laws.shape[-1])
        elif width > self.budget:
            width = self.budget
        top, ids = laws.topk(width)
        fresh = self.children(top.tolist(), ids.tolist(), drafter)
        merged = sorted(self.best + fresh, key=_order)
        self.best = merged[: self.budget]
        depth = parents[0].depth + 1
        eos = self.row.params.eos
        least = FEED * self.level_price
        last, before = self.gain, self.worth
        self.paid, self.worth = paying([node.value for node in self.best], self.node_prices)
        self.gain = self.worth - before
        self.frontier = [
            n
            for n in self.best[: self.paid]
            if n.depth == depth and n.value >= least and n.token not in eos
        ]
        if depth >= self.depth or not self.frontier:
            return False
        if drafter.shape is not None:
            self.frontier = [n for n in self.frontier if drafter.shape.children(n.ranks)]
            return bool(self.frontier)
        # The children of a level are worth at most the level itself.
        if sum(node.value for node in self.frontier) < drafter.config.min_gain:
            return False
        if depth > 1:
            drafter.decline.update(last, self.gain)
        return self.gain * drafter.decline.share >= self.level_price

    def laws(self, logits: Tensor) -> Tensor:
        """The warped law after each node of the frontier, along its own path."""
        warp = self.warp
        if not warp.path_dependent:
            return warp.probabilities(warp.biased(logits))
        rows = []
        for node, scored in zip(self.frontier, logits, strict=True):
            path: list[int] = []
            above: Node | None = node
            while above is not None and above.parent is not None:
                path.append(above.token)
                above = above.parent
            try:
                rows.append(warp.law(self.row.tokens, scored, path[::-1]))
            except ConfigError:  # the options let nothing follow this path: no children
                rows.append(torch.zeros_like(scored, dtype=torch.float32))
        return torch.stack(rows)

    def children(
        self, laws: list[list[float]], ids: list[list[int]], drafter: TreeModel
    ) -> list[Node]:
        """Candidates below the frontier that can still be among the best."""
        shape, greedy = drafter.shape, self.row.warp.greedy
        trust = drafter.trust if drafter.config.calibrate and shape is None else None
        depth = self.frontier[0].depth + 1
        full = len(self.best) >= self.budget
        least = self.best[-1].value if full else self.floor
        fresh: list[Node] = []
        for node, row_laws, row_ids in zip(self.frontier, laws, ids, strict=True):
            allowed = None if shape is None else shape.children(node.ranks)
            for rank, (law, token) in enumerate(zip(row_laws, row_ids, strict=True)):
                if law <= 0.0 or node.value <= least:
                    break  # laws fall with the rank, and no child is worth more than its parent
                value = node.value * (law if trust is None else trust.chance(law, rank, greedy))
                if value <= least:
                    if rank:
                        break  # only the favourite is trusted by another measure than the next
                    continue
                if allowed is not None and rank not in allowed:
                    continue
                self.created += 1
                child = Node(token, node, depth, law, value, rank, self.created)
                if allowed is not None:
                    child.ranks = (*node.ranks, rank)
                fresh.append(child)
        return fresh

    def teach(self, trust: Trust, path: Sequence[int]) -> None:
        """Tell which children of the nodes that were reached were the accepted ones."""
        greedy = self.row.warp.greedy
        reached = {id(self.kept[node]) for node in (0, *path)}
        for node in self.kept[1:]:
            if id(node.parent) in reached:
                trust.tried(node.law, node.rank, greedy, id(node) in reached)

    def finish(self) -> TokenTree:
        """The best nodes that pay, by depth, then creation, as a tree."""
        ordered = sorted(self.best[: self.paid], key=lambda node: (node.depth, node.order))
        self.kept = [self.kept[0], *ordered]
        place = {id(node): i for i, node in enumerate(self.kept)}
        return TokenTree(
            tuple(node.token for node in self.kept),
            (-1, *(place[id(node.parent)] for node in ordered)),
        )


def _order(node: Node) -> tuple[float, int]:
    """Largest value first; ties go to the older node, which keeps parents before children."""
    return -node.value, node.order
