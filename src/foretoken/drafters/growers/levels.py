"""What growers share that draw a tree level by level.

Above temperature 0 children are drawn from the row's own warp of the draft model's logits, and
whether a node gets another child is decided before that child is drawn, from draws made earlier.
That alone keeps the law: the next child of a node, whenever it comes, is distributed as the next
draw at that node, which is all that a rule for drawn siblings asks for. At temperature 0 the
candidates are fixed (POINT), the likeliest ones.
"""

from __future__ import annotations

from torch import Tensor

from foretoken.coins import Coins
from foretoken.contract import DraftModel, StoppingRule
from foretoken.drafters.growers.grower import Grower, Growth
from foretoken.drafters.growers.tree_growth import TreeGrowth
from foretoken.trees.mixed import best_and_rest
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Go,
    Memory,
    Scores,
    Shape,
    TokenTree,
    Traits,
)
from foretoken.warp.residual import without


class LevelGrowth(TreeGrowth):
    """One row's tree under way: override `spawn`, which adds the children of a level."""

    def __init__(self, row: DecodeState, widths: tuple[int, ...], kind: Draw) -> None:
        super().__init__(row)
        self.widths, self.kind = widths, kind  # what a level may have, and how it is drawn
        self.laws: list[Tensor | None] = [None]  # [V] of each node's children
        self.mass = [1.0]  # the draft model's law of the whole path
        self.beam = [0]  # for growers that keep one

    @property
    def width(self) -> int:
        """What the level under way may have."""
        return self.widths[self.level]

    def spawn(self, laws: dict[int, Tensor]) -> None:
        """Add the children of the nodes just fed, and keep the laws they were drawn from."""
        raise NotImplementedError

    def add(self, token: int, parent: int, chance: float = 1.0) -> int:
        """A new node, drawn with `chance` after its parent."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.laws.append(None)
        self.mass.append(self.mass[parent] * chance)
        return len(self.tokens) - 1

    def take(self, score: Scores, stop: StoppingRule | None) -> bool:
        nodes, laws = self.read(score.logits)
        if not self.greedy:
            nodes, laws = with_laws(nodes, laws)
        go = self.ask(stop, nodes, laws, score)
        if go is Go.STOP:
            return False
        born, eos = len(self.tokens), self.row.params.eos
        self.spawn(dict(zip(nodes, laws, strict=True)))
        self.frontier = [n for n in range(born, len(self.tokens)) if self.tokens[n] not in eos]
        self.level += 1
        return go is Go.ON and bool(self.frontier) and self.level < len(self.widths)

    def draft(self) -> Draft:
        tree = TokenTree(tuple(self.tokens), tuple(self.parents))
        if self.kind is Draw.POINT:
            return Draft(tree, Draw.POINT)
        return Draft(tree, self.kind, tuple(self.laws))


def drawn(kind: Draw) -> Traits:
    """What a grower of such trees is, if its children above temperature 0 are of this kind."""
    return Traits(frozenset({Draw.POINT, kind}), Shape.TREE, memory=Memory.NOTHING)


def with_laws(nodes: list[int], laws: Tensor) -> tuple[list[int], Tensor]:
    """The nodes that a token can be drawn after, and their laws: NaN is no law.

    Half precision overflows at guesses that no text reaches: these have no children. A law is over
    its sum, so if any of it is NaN all of it is: one number of each tells.
    """
    first = laws[:, 0].tolist()
    kept = [i for i, chance in enumerate(first) if chance == chance]
    if len(kept) == len(nodes):
        return nodes, laws
    return [nodes[i] for i in kept], laws[kept]


class Levels(Grower):
    """Base of growers of such trees: override `levels` (the shape) and name the `growth`."""

    growth: type[LevelGrowth]
    kind: Draw  # of children above temperature 0

    def __init__(self, model: DraftModel, kind: Draw) -> None:
        self.kind = kind
        if kind not in self.traits.draws:
            self.traits = drawn(kind)
        super().__init__(model)

    def levels(self, depth: int, nodes: int) -> tuple[int, ...]:
        """What each level of a draft may have."""
        raise NotImplementedError

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        kind = Draw.POINT if row.warp.greedy else self.kind
        return self.growth(row, self.levels(depth, budget.nodes), kind)


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


def likeliest(law: Tensor, count: int) -> list[int]:
    """The `count` best tokens that are possible at all."""
    best, ids = law.topk(min(count, law.shape[-1]))
    return [t for p, t in zip(best.tolist(), ids.tolist(), strict=True) if p > 0.0]
