"""How long drafts should be: expected tokens against seconds, for a whole batch at once.

A request whose guesses stand with chance a gets l(a, k) = 1 + a + ... + a^k tokens from k of them
(SmartSpec, arXiv 2406.14066). The paper finds one k for the batch and then deals it out by
acceptance. Here every node goes to the row whose steps it makes fewer by the largest share, and how
many there are follows from the seconds they take. Giving it to the row where it is likeliest to
stand would bring the most tokens in this step; but every request is to be written to its end, and a
batch that serves its easy rows first is left with the others. In a closed loop each row is best
given the length that would be best if all rows were like it, and this comes close to that. For
equal rows it is the paper's goodput.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf, log

from foretoken.controllers.survival import Ranks
from foretoken.trees.counts import Counts
from foretoken.trees.select import best_first_shape

FEW = 16  # tokens up to which a larger forward may be the cheaper one
HOPELESS = 0.01  # nodes that are less likely to stand are not considered
WIDTH = 8  # ranks of children told apart
PATIENCE = 2  # levels looked at beyond the last that paid
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # of trees looked at


def expected_length(a: float, k: int) -> float:
    """l(a, k): tokens of a step of k guesses that stand with chance a each, and of its verdict."""
    return k + 1.0 if a >= 1.0 else (1.0 - a ** (k + 1)) / (1.0 - a)


def best_length(a: float, rows: int, longest: int, seconds: Callable[[int], float]) -> int:
    """The one length of most tokens per second for equal rows, 0 included.

    All are looked at: measured seconds are noisy, and need not have a single peak.
    """
    return max(range(longest + 1), key=lambda k: rows * expected_length(a, k) / seconds(k))


class Acceptance(Counts):
    """Chance that a guess stands, given that all before it do: accepted / (accepted + rejected).

    What follows the first rejection was not tried, so this is unbiased whatever lengths were
    chosen; accepted / proposed is not. Counts fade by guess and not by step: long drafts that stood
    would else outweigh for long what short ones say later.
    """

    __slots__ = ()

    def update(self, accepted: int, rejected: bool) -> None:
        self.fade(accepted + rejected)
        for _ in range(accepted):
            self.tried(0, True)
        if rejected:
            self.tried(0, False)

    def chance(self, prior: float, weight: float) -> float:
        return self.rate(0, prior, weight)


class Likeness:
    """How many guesses of its own a request is told apart by: as many as would have foretold what
    came best. Where requests are alike, single ones are known by all of them.
    """

    __slots__ = ("scores",)

    WEIGHTS = (4.0, 16.0, 64.0, 256.0)  # guesses that the acceptance of all counts as
    FADE = 0.5 ** (1 / 512)  # per draft

    def __init__(self) -> None:
        self.scores = [-0.1, 0.0, -0.1, -0.2]  # of the weights: logarithms of chances

    @property
    def weight(self) -> float:
        return self.WEIGHTS[max(range(len(self.scores)), key=self.scores.__getitem__)]

    def update(self, own: Acceptance, usual: float, accepted: int, rejected: bool) -> None:
        """Hold what came against what each weight had said; `own` does not know it yet."""
        for place, weight in enumerate(self.WEIGHTS):
            chance = min(max(own.chance(usual, weight), 0.001), 0.999)
            said = accepted * log(chance) + rejected * log(1.0 - chance)
            self.scores[place] = self.scores[place] * self.FADE + said


@dataclass(frozen=True, slots=True)
class Outline:
    """What a draft looks like, node by node: how likely each stands where all rows are alike, how
    deep it is, and how deep the draft is up to it. Likeliest first.
    """

    values: tuple[float, ...]
    depths: tuple[int, ...]
    deepest: tuple[int, ...]

    @classmethod
    def chain(cls, a: float, longest: int) -> Outline:
        depths = tuple(range(1, longest + 1))
        return cls(tuple([a**k for k in depths]), depths, depths)

    @classmethod
    def tree(cls, ranks: Ranks, a: float, nodes: int, depth: int) -> Outline:
        """The best static tree by the chances of ranks; `a` is what the first is taken for."""
        shape = best_first_shape(ranks.rates(WIDTH, a, 2.0), nodes, depth)
        depths = [0]
        for parent in shape.parents[1:]:
            depths.append(depths[parent] + 1)
        return cls(shape.values[1:], tuple(depths[1:]), tuple(accumulate(depths[1:], max)))

    def of_row(self, factor: float, kept: float) -> list[float]:
        """The nodes of a row whose levels stand `factor` times as often as those of all rows, of
        whose promises so much is kept.
        """
        own = [min(v * factor**d, 1.0) for v, d in zip(self.values, self.depths, strict=True)]
        return [kept * value for value in accumulate(own, min) if value >= HOPELESS]


@dataclass(frozen=True, slots=True)
class Seconds:
    """What the step to come costs."""

    scoring: Sequence[float]  # a target forward, by nodes drafted in all
    levels: Sequence[float]  # drafting, by the deepest level; none: 0
    row: float = 0.0  # per row that is asked
    node: float = 0.0  # to draft

    def drafted(self, rows: int, depth: int, nodes: float) -> float:
        """A step in which so many rows draft."""
        spent = self.levels[depth] + self.row * rows + self.node * nodes
        return spent + self.scoring[int(nodes + 0.5)]

    @property
    def least(self) -> float:
        """What one node more costs at least; nothing where a size is cheaper than a smaller one,
        which no size beyond the first few is.
        """
        few = self.scoring[: FEW + 2]
        return max(self.node + min([b - a for a, b in pairwise(few)], default=0.0), 0.0)


@dataclass(frozen=True, slots=True)
class Allotment:
    """Nodes of every row, and the goodput they promise: of one row, by its logarithm."""

    nodes: list[int]
    goodput: float


Gain = tuple[float, int, int, float]


def gains(offers: Sequence[Sequence[float]]) -> list[Gain]:
    """The nodes of all rows, best first: by how much each makes its row's steps fewer (negative, to
    be sorted by), its place in the row's offers, the row, and the logarithm of what it makes of the
    row's tokens.
    """
    order = []
    for at, own in enumerate(offers):
        tokens = 1.0
        for place, value in enumerate(own):
            gain = value / tokens
            order.append((-gain, place, at, log(1.0 + gain)))
            tokens += value
    order.sort()
    return order


def allot(
    offers: Sequence[Sequence[float]],
    deepest: Sequence[int],
    seconds: Seconds,
    margin: float,
    share: float = 1.0,
) -> Allotment:
    """The nodes that let all rows get on fastest: `offers[i]` are those of row i, `deepest` how
    deep a draft of so many is.

    What is largest is the product of the rows' tokens, each over the seconds of the step. Rows
    share the forwards of the draft: for every depth that may be paid for, every prefix of the best
    order is a candidate. No node at all is one, too, and has to be beaten by `margin`. `share`: of
    rows that have a proposal at all, where that is not known yet.
    """
    count, order = len(offers), gains(offers)
    best, kept, depth = count * log(margin / seconds.scoring[0]), order[:0], 0
    levels = sorted(set(deepest[: max(map(len, offers), default=0)]))
    if count == 1 or seconds.levels[-1] <= seconds.levels[1]:
        levels = levels[-1:]  # a lone row's nodes come level by level; free levels are no choice
    for level in levels:
        if level > max(depth, 1) + PATIENCE and count > 1:
            break  # deeper drafts have not paid for their levels
        within = [one for one in order if deepest[one[1]] <= level]
        goodput, taken = best_prefix(
            within, deepest, 0 if count == 1 else level, count, seconds, share
        )
        if goodput > best:
            best, kept, depth = goodput, within[:taken], level
    chosen = [0] * count
    for _, _, at, _ in kept:
        chosen[at] += 1
    return Allotment(chosen, best / count)


def best_prefix(
    order: Sequence[Gain],
    deepest: Sequence[int],
    depth: int,
    count: int,
    seconds: Seconds,
    share: float,
) -> tuple[float, int]:
    """How many nodes of an order to take where drafts are paid to be `depth` deep, or as deep as
    the nodes are, and the goodput of that.

    Gains fall: where costs rise by more than that, no further one can win.
    """
    most = seconds.drafted(count, deepest[-1], len(order) * share)
    enough = count * seconds.least / (most + seconds.least)
    best, best_at, won, nodes, asked = -inf, 0, 0.0, 0.0, 0
    scoring, levels, row, node = seconds.scoring, seconds.levels, seconds.row, seconds.node
    for taken, (gain, place, _, more) in enumerate(order, 1):
        if -gain <= enough:
            break
        won += share * more
        nodes += share
        asked += place == 0
        if deepest[place] > depth:
            depth = deepest[place]
        spent = scoring[int(nodes + 0.5)] + levels[depth] + row * asked + node * nodes
        goodput = won - count * log(spent)
        if goodput > best:
            best, best_at = goodput, taken
    return best, best_at


def cut(
    promises: Sequence[Sequence[float]], scoring: Sequence[float], drafting: float
) -> list[list[int]]:
    """Of proposals that were made already, the nodes of every row that are worth scoring.

    `promises[i]` are those of row i's nodes below the root, none above its parent's; the root is
    among the nodes that are kept.
    """
    places = [sorted(range(len(own)), key=lambda node: -own[node]) for own in promises]
    order = gains([[own[node] for node in at] for own, at in zip(promises, places, strict=True)])
    count = len(promises)
    best, best_at, won = -count * log(scoring[0] + drafting), 0, 0.0
    for taken, (_, _, _, more) in enumerate(order, 1):
        won += more
        goodput = won - count * log(scoring[taken] + drafting)
        if goodput > best:
            best, best_at = goodput, taken
    kept: list[list[int]] = [[0] for _ in promises]
    for _, place, at, _ in order[:best_at]:
        kept[at].append(places[at][place] + 1)
    return [sorted(nodes) for nodes in kept]
