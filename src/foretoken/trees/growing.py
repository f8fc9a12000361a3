"""Trees that a draft model grows by itself: by which rule, and what has become of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from jaxtyping import Float, Int
from torch import Tensor

from foretoken.trees.worth import Calibration, Decline
from foretoken.types import Rows


@dataclass(slots=True)
class Drawing:
    """How the tokens of a chain are drawn, where they are not the likeliest."""

    temperature: float  # of the laws
    width: int  # tokens that a law has
    coins: Sequence[float]  # [depth] in [0, 1): one for each token


@dataclass(slots=True)
class GrowthRule:
    """How a tree grows of which nobody asks anything between its levels: its candidates are the
    likeliest tokens, or those of a chain are drawn. A chain is a tree of one branch."""

    depth: int
    nodes: int  # candidates that are kept
    branch: int  # likeliest tokens looked at below a node
    temperature: float = 1.0  # of the probabilities that candidates are ranked by
    ends: Collection[int] = ()  # tokens that nothing follows
    prices: Sequence[float] = ()  # [n]: of scoring n nodes below the root; empty: none
    floor: float = -1.0  # the value that any candidate must exceed
    # A node is fed if its value, times `share`, is at least `least` or, where there are any, the
    # bar of its level.
    least: float = 0.0
    bars: Sequence[float] = ()
    share: float = 1.0
    level: float = 0.0  # expected tokens that a level costs
    min_gain: float = 0.0  # no further level that can add fewer
    calibration: Calibration | None = None  # of the draft's confidence
    decline: Decline | None = None  # what a level adds beside the one before; None: as much
    greedy: bool = True  # calibrate as of greedy rows
    rehearsed: bool = False  # favourites are certain, and nothing is learned
    drawing: Drawing | None = None  # of a chain; None: the likeliest


@dataclass(slots=True)
class Grown:
    """A tree so far; lists run over its nodes in the order of their creation, the root first."""

    whole: bool  # False: the nodes of `frontier` are to be fed, and it goes on from there
    tokens: list[int]
    parents: list[int]
    ranks: list[int]  # among the followers of their parent
    laws: list[float]  # the draft's probability of each, given its parent
    values: list[float]  # that the target comes as far as each
    places: list[int]  # in the model's open tree; -1: never fed
    best: list[int]  # the kept candidates, best first
    paid: int  # of these, those worth their price
    frontier: list[int]
    level: int
    worth: float  # expected tokens above the price
    gain: float  # of it, what the last level added
    said: Float[Tensor, "n W"] | None = None  # behind tokens' logits, by place, if more was said
    drawn: Float[Tensor, "n V"] | None = None  # laws of tokens that were drawn, but for the root


class GrowsTrees(Protocol):
    """A model that may grow trees in one call."""

    def grow_trees(
        self, rows: Rows, rules: Sequence[GrowthRule], names: Int[Tensor, "n"] | None = None
    ) -> list[Grown | None]:
        """Open a new tree of each row and let it grow; None: to be asked level by level instead.

        `names` are the tokens of the first columns of its logits, where others do not count.
        """
        ...


def grows_trees(model: Any) -> TypeGuard[GrowsTrees]:
    """Whether a model has such a call of its own: a wrapper passes on what it does not know."""
    return hasattr(type(model), "grow_trees")
