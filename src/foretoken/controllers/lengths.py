"""How long drafts should be: expected tokens against seconds, for a whole batch at once.

A request whose guesses stand with chance a gets l(a, k) = 1 + a + ... + a^k tokens from k of them
(SmartSpec, arXiv 2406.14066). The paper finds one k for the batch and then deals it out by
acceptance; here every node goes to the row where it is likeliest to stand, which is the best use of
any number of nodes, and how many there are follows from the seconds they take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from foretoken.controllers.survival import Ranks
from foretoken.trees.counts import Counts
from foretoken.trees.select import best_first_shape

HOPELESS = 0.01  # nodes that are less likely to stand are not considered
WIDTH = 8  # ranks of children told apart
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
    chosen; accepted / proposed is not.
    """

    __slots__ = ()

    def update(self, accepted: int, rejected: bool) -> None:
        self.fade()
        for _ in range(accepted):
            self.tried(0, True)
        if rejected:
            self.tried(0, False)

    def chance(self, prior: float, weight: float) -> float:
        return self.rate(0, prior, weight)


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
        """The best static tree by the chances of ranks, none of which can say more than `a`."""
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

    scoring: Sequence[float]  # by nodes drafted in all
    start: float  # of a draft in any case
    row: float  # per row that is asked
    level: float
    node: float  # to draft

    @property
    def least(self) -> float:
        """What one node more costs at least."""
        few = self.scoring[:3]
        return self.node + min([b - a for a, b in pairwise(few)], default=0.0)


@dataclass(frozen=True, slots=True)
class Allotment:
    """Nodes of every row, and the tokens per second that they promise."""

    nodes: list[int]
    rate: float


def allot(
    offers: Sequence[Sequence[float]],
    deepest: Sequence[int],
    seconds: Seconds,
    margin: float,
    share: float = 1.0,
) -> Allotment:
    """The nodes that give most tokens per second, over all rows: `offers[i]` are those of row i.

    Nodes enter by what they promise, and every prefix of that order is a candidate, none of them
    included, which has to be beaten by `margin`. It ends where no node can pay any more: costs rise
    and promises fall. `share`: of rows that have a proposal at all, where that is not known yet.
    """
    count = len(offers)
    order = sorted(
        [(-v, place, at) for at, own in enumerate(offers) for place, v in enumerate(own)]
    )
    scoring, least = seconds.scoring, seconds.least
    best, best_at = margin * count / scoring[0], 0
    tokens, nodes, depth, asked = float(count), 0.0, 0, 0
    for taken, (value, place, _) in enumerate(order, 1):
        if -value <= best * least:
            break
        tokens -= value * share
        nodes += share
        asked += place == 0
        if deepest[place] > depth:
            depth = deepest[place]
        spent = scoring[int(nodes + 0.5)] + seconds.start + seconds.row * asked
        spent += seconds.level * depth + seconds.node * nodes
        if tokens > best * spent:
            best, best_at = tokens / spent, taken
    chosen = [0] * count
    for _, _, at in order[:best_at]:
        chosen[at] += 1
    return Allotment(chosen, best)


def cut(
    promises: Sequence[Sequence[float]], scoring: Sequence[float], drafting: float
) -> list[list[int]]:
    """Of proposals that were made already, the nodes of every row that are worth scoring.

    `promises[i]` are those of row i's nodes below the root, none above its parent's; the root is
    among the nodes that are kept.
    """
    order = sorted(
        [(-v, node, at) for at, own in enumerate(promises) for node, v in enumerate(own, 1)]
    )
    tokens = float(len(promises))
    best, best_at = tokens / (scoring[0] + drafting), 0
    for taken, (value, _, _) in enumerate(order, 1):
        tokens -= value
        if tokens > best * (scoring[taken] + drafting):
            best, best_at = tokens / (scoring[taken] + drafting), taken
    kept: list[list[int]] = [[0] for _ in promises]
    for _, node, at in order[:best_at]:
        kept[at].append(node)
    return [sorted(nodes) for nodes in kept]
