"""What several texts of one prompt share: a tree of their tokens, its leaves, and its pruning.

Node 0 repeats the row's last committed token, as in every tree of this house. Beams are leaves: a
prefix that several of them share is one path of nodes, fed once and cached once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from foretoken.trees.build import Trie
from foretoken.types import DecodeState


class Forest(Trie):
    """The texts of one row as a tree of their tokens."""

    __slots__ = ()

    def above(self, node: int) -> list[int]:
        """The path from the root (included) to the parent of `node`."""
        path = []
        while (node := self.parents[node]) >= 0:
            path.append(node)
        return path[::-1]

    def text(self, node: int) -> list[int]:
        """Tokens below the root down to `node`."""
        return [self.tokens[i] for i in (*self.above(node), node)[1:]] if node else []

    def pruned(self, leaves: Sequence[int]) -> tuple[Forest, Cut]:
        """What is left when only `leaves` go on, its root the last node that they all share."""
        paths = [[*self.above(leaf), leaf] for leaf in leaves]
        shared = 0
        for nodes in zip(*paths, strict=False):
            if len(set(nodes)) > 1:
                break
            shared += 1
        settled, root = paths[0][: shared - 1], paths[0][shared - 1]
        rest = sorted({node for path in paths for node in path[shared:]})
        forest, numbers = Forest(self.tokens[root]), {root: 0}
        for node in rest:
            numbers[node] = forest.child(numbers[self.parents[node]], self.tokens[node])
        ends = set(leaves)
        return forest, Cut(settled, [node for node in (root, *rest) if node not in ends], numbers)


@dataclass(frozen=True, slots=True)
class Cut:
    """What became of the nodes of a pruned forest."""

    settled: list[int]  # nodes above the new root: every text goes through them
    inner: list[int]  # the new root and what lies below it, leaves aside
    numbers: dict[int, int]  # old node -> new node, for the new root and all below it


@dataclass(frozen=True, slots=True)
class Beam:
    """One of a row's texts while it is written."""

    node: int  # of its last token, in the row's forest
    weight: float  # log of its share when it was drawn (joint law: `warp.joint`)
    # of its new tokens, under the target's law behind penalties, bias, processors and grammar,
    # untempered
    log_likelihood: float


@dataclass(frozen=True, slots=True)
class Written:
    """A text that is complete."""

    tokens: tuple[int, ...]  # new ones, the one that ended it included
    log_likelihood: float
    reason: str  # "stop" or "length"

    @property
    def score(self) -> float:
        """Mean log-likelihood of a token: what texts of different lengths are compared by."""
        return self.log_likelihood / len(self.tokens)


@dataclass(frozen=True, slots=True)
class Layer:
    """One depth of a draft: nodes drawn independently from one law over (parent, token) pairs."""

    parents: tuple[int, ...]
    q: Float[Tensor, "mV"]  # pair `i * V + token` is `token` after parents[i]
    pairs: tuple[int, ...]  # in draw order, repeats included
    nodes: tuple[int, ...]  # the node each pair became; equal pairs share one


@dataclass(slots=True, eq=False)
class BeamRow:
    """One request: a row whose tokens all its texts share, and the beams that go on from there."""

    state: DecodeState
    width: int  # most beams drawn at once
    forest: Forest = field(init=False)
    beams: list[Beam] = field(init=False)
    written: list[Written] = field(default_factory=list)  # the best first
    columns: dict[int, int] = field(default_factory=dict)  # node -> place in the target's open tree

    def __post_init__(self) -> None:
        self.forest = Forest(self.state.tokens[-1])
        self.beams = [Beam(0, 0.0, 0.0)]  # equal beams would split the first law: start from one

    @property
    def length(self) -> int:
        """New tokens of every beam."""
        return len(self.state.new_tokens) + len(self.forest.above(self.beams[0].node))

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return self.state.limit[0] - self.length

    def settle(self, beams: Sequence[Beam]) -> Cut:
        """Go on with `beams`; tokens that all of them share are the row's own from now on."""
        forest, cut = self.forest.pruned([beam.node for beam in beams])
        shared = [self.forest.tokens[node] for node in cut.settled[1:]]
        if cut.settled:
            self.state.tokens += [*shared, forest.tokens[0]]
        self.forest = forest
        self.beams = [
            Beam(cut.numbers[beam.node], beam.weight, beam.log_likelihood) for beam in beams
        ]
        return cut
