"""Recycle what the target said about tokens it scored: a tree for nothing (arXiv 2408.08696).

A matrix keeps, for every token, the followers that were likeliest the last time the target scored
that token, accepted or not. A fixed template of ranks is walked through it from the last token on.
The matrix is shared by all requests; rows that are only timed write to a copy. Five differences: an
unknown follower makes no node (the released code drafts token 0); rows nobody has scored yet know
the followers seen in prompts; of several nodes with one token the last in level order is believed
(as good as the first or the accepted one, measured); under a small node budget the template is cut
to the ranks that were accepted most often; and where nodes have prices there is no template: the
matrix keeps how sure the target was, and the likeliest nodes are drafted as far as they pay.
"""

from __future__ import annotations

import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from foretoken.contract import Features, LanguageModel
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.drafters.parts.adjacency import EDGES, Adjacency
from foretoken.drafters.parts.chances import trials
from foretoken.drafters.parts.class_odds import ClassOdds
from foretoken.drafters.parts.likeliest import followers
from foretoken.drafters.parts.look_up import LookUp
from foretoken.errors import ConfigError, check_values
from foretoken.trees.build import parents_among
from foretoken.trees.counts import Counts
from foretoken.trees.guesses import Guesses
from foretoken.trees.select import best_first_shape, best_nodes
from foretoken.trees.templates import Form, Template, level_order, paths_of_counts
from foretoken.trees.worth import least_paying
from foretoken.types import Budget, DecodeState, Memory, Shape, Step, TokenTree, Traits

# Children of each node, level by level: the released template of 80 nodes below the root.
PAPER = paths_of_counts(
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0),
    (2, 0, 0, 1, 0, 0, 0, 0),
)


class TokenRecycling(LookUp):
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

        def fitting(self, depth: int | None, nodes: int | None) -> Budget | None:
            """The size of a template that was named, which can be told before a matrix is made.

            `depth` asks for its first levels alone; fewer nodes than these have are refused.
            """
            if self.template is None or self.free:
                return None
            size = size_of(self.template, depth)
            if nodes is not None and size.nodes > nodes > 0:
                raise ConfigError(
                    f"template={self.template!r} was asked for with nodes={nodes}.",
                    f"the {size.depth} levels of it that are drafted have {size.nodes} nodes.",
                    f"pass nodes={size.nodes} or leave nodes out, or name a smaller template.",
                )
            return size if nodes is None else Budget(size.depth, nodes)

    def __init__(self, target: LanguageModel, config: Config | None = None) -> None:
        self.config = config or self.Config()
        settings = self.config
        check_values(settings, ("keep", settings.keep >= 1, "1 or more followers per token"))
        self.known = Adjacency(target.vocab_size, settings.keep)
        self.scratch: Adjacency | None = None  # of all rows that are rehearsed, once there is one
        self.place = None if settings.memory is None else os.path.expanduser(settings.memory)
        if self.place is not None and Path(self.place).exists():
            self.known.load(self.place)
        form = PAPER if settings.template is None else settings.template
        template = None if settings.free else Template(form)
        if template is not None and settings.template is not None:  # it would be cut unseen
            widest = f"at most keep={settings.keep} children wide"
            check_values(settings, ("template", template.width <= settings.keep, widest))
        self.shapes = RankShapes(template, self.known.keep)
        self.grows = settings.template is None and not settings.free
        self.trust, self.cut = Trust(), Guesses()
        self.vocabulary: Mapping[str, int] = {}  # of the tokenizer, where it is known

    def fitting(self, depth: int | None, nodes: int | None) -> Budget | None:
        return self.config.fitting(depth, nodes)

    def check_vocabulary(self, vocabulary: Mapping[str, int]) -> None:
        """Refuse a matrix of another tokenizer, and write into its file which one it is of."""
        self.vocabulary = vocabulary
        if self.place is not None:
            self.known.agree(Vocabulary.of(vocabulary).fingerprint, self.place)

    def save(self, path: str | Path | None = None) -> None:
        """Write the matrix to `path`, or to the configured file; without either, do nothing."""
        path = self.place if path is None else os.path.expanduser(path)
        if path is not None:
            if self.known.words is None and self.vocabulary:
                self.known.words = Vocabulary.of(self.vocabulary).fingerprint
            self.known.save(path)

    def start(self, row: DecodeState, seen: Features | None) -> None:
        known = self.known
        if row.rehearsal:  # nothing is learned of it, but its steps do the same work
            known = self.scratch = self.scratch or known.copy()
        row.private[self] = _Asked(known, array("q", row.params.eos))
        if self.config.from_prompt:
            for token, follower in pairwise(row.tokens):
                known.hint(token, follower)

    def look_up(self, row: DecodeState, budget: Budget) -> Guesses:
        state: _Asked | None = row.private.get(self)
        if state is None:
            state = row.private[self] = _Asked(self.known, array("q", row.params.eos))
        found, root = state.found, row.tokens[-1]
        state.asked = min(budget.depth, budget.nodes) > 0
        if not state.asked:
            found.clear(root)
            return found
        state.grown = self.grows and least_paying(budget) is not None
        if state.grown:
            state.known.grow(found, root, self.trust, budget, row.warp.greedy, state.ends)
            return found
        parents, shape = self.shapes.within(budget)
        tree, ranks = state.known.fill(root, parents, shape, row.params.eos)
        chances = [1.0]
        for parent, rank in zip(tree.parents[1:], ranks[1:], strict=True):
            chances.append(chances[parent] * self.shapes.rates[rank])
        found.fill(tree, chances, [0, *ranks[1:]])
        return found

    def observe(self, step: Step) -> None:
        """Rows that were asked for a draft say what follows; the others cost no time."""
        for row, draft, score, said in zip(
            step.rows, step.drafts, step.scores, step.emitted, strict=True
        ):
            state: _Asked | None = row.private.get(self)
            if state is None or not state.asked:
                continue
            if not row.rehearsal:
                self.learn(state, said, row.warp.greedy)
            # where they lie, and no copy: logits are most of what a step takes in memory
            told = zip(draft.tree.tokens, *followers(score.logits, state.known.keep), strict=True)
            for token, best, shares in told:  # of nodes with one token the last wins
                state.known.put(token, best, [bisect_left(EDGES, share) for share in shares])

    def learn(self, state: _Asked, said: Sequence[int], greedy: bool) -> None:
        """Compare what was proposed with the tokens that came."""
        if state.grown:
            self.trust.all_tried(state.found, said, greedy)
        else:
            self.shapes.update(state.found.tree, state.found.marks, said)


@dataclass(slots=True)
class _Asked:
    """What is known of one row, and what was proposed for the step under way."""

    known: Adjacency
    ends: array[int]  # tokens that nothing follows
    found: Guesses = field(default_factory=Guesses)  # another tree may be scored in its place
    asked: bool = False
    grown: bool = False  # marks are classes of shares; otherwise a template was followed, by ranks


class Trust(ClassOdds):
    """How often followers came, by the share of the target's belief that went to them, a first
    follower apart from a further one."""

    FIRST, NEXT = 0.5, 0.4  # what a share is worth before anything was seen
    READ = 0.15, 0.08  # what a follower read in a prompt is worth
    WEIGHT = 12.0  # trials that this is worth
    FADE = 0.5 ** (1 / 512)

    def __init__(self) -> None:
        middle = [sum(pair) / 2.0 for pair in pairwise((0.0, *EDGES, 1.0))]
        first = [*(self.FIRST * share for share in middle), self.READ[0]]
        further = [*(self.NEXT * share for share in middle), self.READ[1]]
        super().__init__([*first, *further], self.WEIGHT, self.FADE)


def size_of(form: Form, depth: int | None) -> Budget:
    """How deep a template is and how many nodes it has, or its first `depth` levels."""
    template = Template(form)
    deepest = template.depth if depth is None else min(depth, template.depth)
    depths = [0]
    for parent in level_order(template)[0][1:]:
        depths.append(depths[parent] + 1)
    return Budget(deepest, sum([0 < at <= deepest for at in depths]))


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
