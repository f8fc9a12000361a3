"""A draft model draws several children for every node of a tree of fixed shape.

Three published trees differ in two ways only. Multi-candidate speculation (MCSD, arXiv 2401.06706)
takes any shape and draws siblings with or without replacement; recursive speculation with constant
branching (RSD-C, arXiv 2402.14160) draws them without, which it writes as Gumbel top-k: the k
largest of log q + Gumbel noise, in their order, have the law of k successive draws; SpecTr
(arXiv 2310.15141) draws whole chains independently of each other. The recursive rule renormalises q
after each distinct sibling, so the siblings' order is the order of their draws.

Each may draw greedily instead (arXiv 2502.18779): of the children of a node all but one are the
likeliest tokens, the last is drawn from the others. The verifiers mixed and traversal are exact for
such children.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foretoken.contract import DraftModel
from foretoken.drafters.growers.levels import (
    LevelGrowth,
    Levels,
    best_and_drawn,
    distinct,
    drawn,
    independent,
    likeliest,
)
from foretoken.errors import ConfigError
from foretoken.trees.levels import cut_branching, level_sizes, nodes_below_root
from foretoken.types import Budget, Draw

Form = tuple[int, ...] | int


class SampledGrowth(LevelGrowth):
    """So many children for every node of a level."""

    def spawn(self, laws: dict[int, Tensor]) -> None:
        coins, width, kind = self.row.coins, self.width, self.kind
        for node, law in laws.items():
            if kind is Draw.MIXED:
                children, law = best_and_drawn(law, width, coins)
            elif self.greedy:
                children = likeliest(law, width)
            elif kind is Draw.IID:
                children = independent(law, width, coins)
            else:
                children = distinct(law, width, coins)
            self.laws[node] = law
            for token in children:
                self.add(token, node)


class FixedShape(Levels):
    """Base of the three: a shape, and how siblings are drawn."""

    DEPTH = 4  # of chains whose depth nobody told
    FORM: Form  # where none was asked for
    Config: Any
    growth: type[LevelGrowth] = SampledGrowth

    def __init__(self, model: DraftModel, config: Any = None) -> None:
        self.config = config = config or self.Config()
        greedy = getattr(config, "greedy_draft", False)
        super().__init__(model, Draw.MIXED if greedy else self.kind)
        self.asked = asked = config.k  # None: FORM, narrowed to whatever budget there is
        self.form = self.FORM if asked is None else asked
        widths = (self.form,) if isinstance(self.form, int) else self.form
        if not widths or min(widths) < 1:
            raise ConfigError(
                f"k={asked!r} was asked for.",
                "every level of a tree has one child per node or more.",
                "pass k=(4, 2, 2), say, or a number of chains such as k=4.",
            )
        if asked is not None and max(widths) > model.vocab_size:
            raise ConfigError(
                f"k={asked!r} was asked for of a draft model of {model.vocab_size} tokens.",
                "a node has at most as many different children as there are tokens.",
                f"pass a k of {model.vocab_size} or less at every level.",
            )

    def shape(self, depth: int | None) -> tuple[int, ...]:
        """Children per node of each level, for a depth that was or was not told."""
        if isinstance(self.form, int):
            depth = self.DEPTH if depth is None else depth
            return (self.form, *[1] * (depth - 1)) if depth > 0 else ()
        return self.form if depth is None else self.form[:depth]

    def fitting(self, depth: int | None, nodes: int | None) -> Budget:
        widths = self.shape(depth)
        whole = nodes_below_root(widths)
        if nodes is None:
            return Budget(len(widths), whole)
        if self.asked is not None and whole > nodes > 0:
            levels = " + ".join(str(size) for size in level_sizes(widths))
            fits = cut_branching(widths, len(widths), nodes)
            raise ConfigError(
                f"k={self.form!r} was asked for with nodes={nodes}.",
                f"that shape has {levels} = {whole} nodes.",
                f"pass nodes={whole} or leave nodes out, or use a shape that fits: k={fits}.",
            )
        return Budget(len(widths) if depth is None else depth, nodes)

    def levels(self, depth: int, nodes: int) -> tuple[int, ...]:
        return cut_branching(self.shape(depth), depth, nodes)


class SampledTree(FixedShape):
    """MCSD: any shape, siblings with or without replacement."""

    FORM = (4, 2, 2)
    kind = Draw.DISTINCT
    traits = drawn(kind)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        # children of every node by depth, such as (4, 2, 2); a number: so many chains.
        # None: (4, 2, 2), narrowed to the budget
        k: Form | None = None
        replacement: bool = False  # siblings drawn with replacement may repeat each other
        greedy_draft: bool = False  # siblings are the likeliest tokens but one, which is drawn

    def __init__(self, model: DraftModel, config: Config | None = None) -> None:
        config = config or self.Config()
        if config.replacement:
            self.kind = Draw.IID
        if config.replacement and config.greedy_draft:
            raise ConfigError(
                "replacement and greedy_draft were asked for together.",
                "of a greedy draft's siblings one is drawn: there is nothing to put back.",
                "leave one of the two out.",
            )
        super().__init__(model, config)


class ConstantBranching(FixedShape):
    """RSD-C: distinct siblings, so many at every depth."""

    FORM = (2, 2, 2)
    kind = Draw.DISTINCT
    traits = drawn(kind)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        # children of every node by depth; None: (2, 2, 2), narrowed to the budget
        k: Form | None = None
        greedy_draft: bool = False  # siblings are the likeliest tokens but one, which is drawn


class IndependentChains(FixedShape):
    """SpecTr: chains drawn independently; they count one by one, even where they repeat."""

    FORM = 4
    kind = Draw.IID
    traits = drawn(kind)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        # chains, or children of every node by depth; None: 4 chains, or what the budget has
        k: Form | None = None
        greedy_draft: bool = False  # chains begin with the likeliest tokens but one, which is drawn
