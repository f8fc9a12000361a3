"""Recycle what the target said about tokens it scored: a tree for nothing (arXiv 2408.08696).

A matrix keeps, for every token, the followers that were likeliest the last time the target scored
that token, accepted or not. A fixed template of ranks is walked through it from the last token on.
The matrix is shared by all requests. Five differences: an unknown follower makes no node (the
released code drafts token 0); rows nobody has scored yet know the followers seen in prompts; of
several nodes with one token the last in level order is believed (as good as the first or the
accepted one, measured); under a small node budget the template is cut to the ranks that were
accepted most often; and where nodes have prices there is no template: the matrix keeps how sure the
target was, and the likeliest nodes are drafted as far as they pay.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.adjacency import EDGES, HINTED, Adjacency
from foretoken.drafters.parts.chances import affordable, trials
from foretoken.drafters.parts.likeliest import followers
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.errors import check_values
from foretoken.trees.build import parents_among, undrafted
from foretoken.trees.counts import Counts
from foretoken.trees.select import best_first_shape, best_nodes
from foretoken.trees.templates import Form, Template, level_order, paths_of_counts
from foretoken.trees.worth import least_paying
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Memory,
    Shape,
    Step,
    TokenTree,
    Traits,
)

# Children of each node, level by level: the released template of 80 nodes below the root.
PAPER = paths_of_counts(
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0),
    (2, 0, 0, 1, 0, 0, 0, 0),
)


class TokenRecycling(RowDrafter):
    """One matrix for all rows, one template for all trees."""

    traits = Traits(shape=Shape.TREE, memory=Memory.ENGINE, prices=True)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        keep: int = 8  # followers remembered per token; paper default
        # None is the paper's template of 80 nodes, six deep, where nothing is priced; other forms
        # as in method tree
        template: Form | None = None
        free: bool = False  # no template: trees from the running acceptance of ranks alone
        from_prompt: bool = True  # tokens never scored follow each other as they did in prompts
        memory: str | None = None  # file the matrix is loaded from, if it exists, and saved to

    def __init__(self, target: LanguageModel, config: Config | None = None) -> None:
        self.config = config or self.Config()
        settings = self.config
        check_values(settings, ("keep", settings.keep >= 1, "1 or more followers per token"))
        self.known = Adjacency(target.vocab_size, settings.keep)
        if settings.memory is not None and Path(settings.memory).exists():
            self.known.load(settings.memory)
        template = None if settings.free else Template(settings.template or PAPER)
        self.shapes = RankShapes(template, self.known.keep)
        self.grows = settings.template is None and not settings.free
        self.trust = Trust()

    def save(self, path: str | Path | None = None) -> None:
        """Write the matrix to `path`, or to the configured file; without either, do nothing."""
        path = path if path is not None else self.config.memory
        if path is not None:
            self.known.save(path)

    def start(self, row: DecodeState, seen: Features | None) -> None:
        if self.config.from_prompt:
            for token, follower in pairwise(row.tokens):
                self.known.hint(token, follower)

    def propose_one(self, row: DecodeState, budget: Budget) -> Draft:
        if min(budget.depth, budget.nodes) <= 0:
            row.private.pop(self, None)
            return undrafted(row)
        if self.grows and least_paying(budget) is not None:
            greedy = row.warp.greedy
            grown = self.known.grow(row.tokens[-1], self.trust.of(greedy), budget, row.params.eos)
            row.private[self] = Proposed(grown.tree, grown.ranks, grown.sure)
            draft = Draft(row.private[self].tree, Draw.POINT, chances=tuple(grown.chances))
            return affordable(draft, budget)
        parents, shape = self.shapes.within(budget)
        tree, ranks = self.known.fill(row.tokens[-1], parents, shape, row.params.eos)
        row.private[self] = Proposed(tree, ranks)  # another tree may be scored in its place
        chances = [1.0]
        for parent, rank in zip(tree.parents[1:], ranks[1:], strict=True):
            chances.append(chances[parent] * self.shapes.rates[rank])
        return affordable(Draft(tree, Draw.POINT, chances=tuple(chances)), budget)

    def observe(self, step: Step) -> None:
        """Rows that were asked for a draft say what follows; the others cost no time."""
        for row, draft, score, said in zip(
            step.rows, step.drafts, step.scores, step.emitted, strict=True
        ):
            proposed: Proposed | None = row.private.get(self)
            if proposed is None:
                continue
            if not row.rehearsal:
                self.learn(proposed, said, row.warp.greedy)
            # where they lie, and no copy: logits are most of what a step takes in memory
            told = zip(draft.tree.tokens, *followers(score.logits, self.known.keep), strict=True)
            for token, best, shares in told:  # of nodes with one token the last wins
                self.known.put(token, best, [bisect_left(EDGES, share) for share in shares])

    def learn(self, proposed: Proposed, said: Sequence[int], greedy: bool) -> None:
        """Compare what was proposed with the tokens that came."""
        if proposed.sure is None:
            self.shapes.update(proposed.tree, proposed.ranks, said)
            return
        for node, _, hit in trials(proposed.tree, said):
            self.trust.tried(proposed.sure[node], proposed.ranks[node], greedy, hit)


@dataclass(frozen=True, slots=True)
class Proposed:
    """What was proposed for the step under way."""

    tree: TokenTree
    ranks: Sequence[int]
    sure: Sequence[int] | None = None  # of a tree that followed no template


class Trust:
    """How often followers came, by the share of the target's belief that went to them."""

    FIRST, NEXT = 0.5, 0.4  # what a share is worth before anything was seen
    READ = 0.15, 0.08  # what a follower read in a prompt is worth
    WEIGHT = 12.0  # trials that this is worth
    EVERY = 16  # trials between looks at what has become of it

    def __init__(self) -> None:
        self.counts = Counts(half_life=2048.0)
        self.trials = 0
        self.tables: dict[bool, tuple[list[float], list[float]]] = {}

    def of(self, greedy: bool) -> tuple[list[float], list[float]]:
        """Chances by class of shares, of a first follower and of a further one."""
        if greedy not in self.tables:
            middle = [sum(pair) / 2.0 for pair in pairwise((0.0, *EDGES, 1.0))]
            first = [*(self.FIRST * share for share in middle), self.READ[0]]
            further = [*(self.NEXT * share for share in middle), self.READ[1]]
            self.tables[greedy] = self.rates(first, 0, greedy), self.rates(further, 1, greedy)
        return self.tables[greedy]

    def rates(self, priors: Sequence[float], rank: int, greedy: bool) -> list[float]:
        return [
            self.counts.rate(self.place(at, rank, greedy), prior, self.WEIGHT)
            for at, prior in enumerate(priors)
        ]

    def place(self, share: int, rank: int, greedy: bool) -> int:
        """Where a class is counted, apart for the first follower and for greedy text."""
        return (2 * (rank > 0) + greedy) * (HINTED + 1) + share

    def tried(self, share: int, rank: int, greedy: bool, hit: bool) -> None:
        """A node whose parent was reached, and whether it was the one."""
        self.counts.fade()
        self.counts.tried(self.place(share, rank, greedy), hit)
        self.trials += 1
        if self.trials % self.EVERY == 0:
            self.tables.clear()


class RankShapes:
    """Shapes of ranks within a budget; the best ranks are those that were accepted before."""

    FIRST, FALL, WEIGHT = 0.3, 0.4, 8.0  # prior of rank 0, of the next ones, and its worth
    EVERY = 32  # steps between looks at what the ranks have become, shorter ones at first
    NOTCH = 0.5  # of powers of two, to which the least chance that can pay is rounded down

    def __init__(self, template: Template | None, keep: int) -> None:
        self.whole: tuple[Sequence[int], Sequence[int]] | None = None
        if template is not None:
            self.whole = level_order(template)
        self.counts = Counts(half_life=512.0)
        self.keep = keep
        self.steps = 0
        self.rates = self.current()
        self.made: dict[tuple[int, int, float], tuple[Sequence[int], Sequence[int]]] = {}

    def within(self, budget: Budget) -> tuple[Sequence[int], Sequence[int]]:
        """Parents and ranks of the shape for this budget, the root first."""
        least = least_paying(budget) or 0.0
        if least:
            least = 2.0 ** (self.NOTCH * math.floor(math.log2(least) / self.NOTCH))
        size = budget.depth, budget.nodes, least
        if size not in self.made:
            self.made[size] = self.make(*size)
        return self.made[size]

    def make(self, depth: int, nodes: int, least: float) -> tuple[Sequence[int], Sequence[int]]:
        """The best nodes of the template, or of all trees if there is none: those that can pay."""
        shape = self.whole
        if shape is None:
            free = best_first_shape(self.rates, nodes, depth)
            shape = free.parents, free.ranks
        parents, ranks = shape
        values, depths = [1.0], [0]
        for parent, rank in zip(parents[1:], ranks[1:], strict=True):
            depths.append(depths[parent] + 1)
            rate = self.rates[rank] if rank < len(self.rates) else 0.0
            values.append(values[parent] * rate if depths[-1] <= depth else 0.0)
        best = best_nodes(values, parents, nodes)
        kept = [i for i in best if values[i] > 0.0 and values[i] >= least]
        return parents_among(kept, parents), [ranks[i] for i in kept]

    def current(self) -> list[float]:
        """Chance of each rank, falling, so that a better sibling is never left out for a worse."""
        rates: list[float] = []
        prior, best = self.FIRST, 1.0
        for rank in range(self.keep):
            best = min(best, self.counts.rate(rank, prior, self.WEIGHT))
            rates.append(best)
            prior = best * self.FALL
        return rates

    def update(self, tree: TokenTree, ranks: Sequence[int], said: Sequence[int]) -> None:
        """Each rank below a reached node was tried, and one of them was right or none."""
        self.counts.fade()
        for node, _, hit in trials(tree, said):
            self.counts.tried(ranks[node], hit)
        self.steps += 1
        if self.steps % self.EVERY == 0 or self.steps in (4, 8, 16):
            self.rates = self.current()
            self.made.clear()
