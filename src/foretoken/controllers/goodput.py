"""How much drafting pays: prices for drafters that know their chances, a size for the others.

Both maximise tokens per second (goodput, arXiv 2406.14066). A drafter that knows the chance of each
of its nodes is told what nodes and levels cost and decides by itself, draft by draft; for the
others the best static shape is found from the running chances of ranks (optimal trees, arXiv
2606.01813).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from foretoken.controllers.step_costs import StepCosts
from foretoken.controllers.survival import BELIEF, Ranks
from foretoken.trees.counts import Pace
from foretoken.trees.select import best_first_shape
from foretoken.types import Budget, Prices

WIDTH = 8  # ranks of children told apart
NONE = Budget(0, 0)


class GoodputPricing:
    """Prices in tokens from the speed that drafting reaches.

    The most tokens per second is the fixed point of Dinkelbach's iteration (1967): maximise tokens
    minus speed times seconds, where the speed is the one that this choice reaches.
    """

    # Accepted tokens vary so much that a dozen steps tell little: a belief given up after three
    # rejections in a row is given up in most texts, and a text of 64 tokens is over before the
    # next probe.
    HOPE = 1.5  # speed-up assumed at first
    TRIALS = 8.0  # steps that this is worth
    PRIOR = 12.0  # steps in a text that the pace of all texts counts as
    CHANGED = 0.02  # share by which the speed may differ from that of the last offer
    STALE = 8  # steps after which it is renewed

    def __init__(self, max_depth: int, max_nodes: int, half_life: float) -> None:
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.pace = Pace(half_life)
        self.last: Budget | None = None
        self.rows = self.drafting = self.age = 0  # of the last offer

    def speed(self, texts: Sequence[Pace]) -> float:
        """Tokens per row in the time of a plain step that drafting reaches in these texts."""
        steps, pace = self.PRIOR * len(texts), self.pace
        everywhere = (pace.tokens + self.TRIALS * self.HOPE) / (pace.spent + self.TRIALS)
        tokens = steps * everywhere + sum(text.tokens for text in texts)
        return tokens / (steps + sum(text.spent for text in texts))

    def gain(self, text: Pace) -> float:
        """Tokens that a step with this drafter brings a text above those of plain steps."""
        pace = self.pace
        everywhere = (pace.gain(1.0) + self.TRIALS * (self.HOPE - 1.0)) / (pace.steps + self.TRIALS)
        return (text.gain(1.0) + self.PRIOR * everywhere) / (text.steps + self.PRIOR)

    def offered(self, costs: StepCosts, rows: int, speed: float, drafting: int) -> Budget:
        """The last offer, as long as little has changed since: most steps are like the last one."""
        last, self.age = self.last, self.age + 1
        if (
            last is None
            or last.prices is None
            or (self.rows, self.drafting) != (rows, drafting)
            or self.age >= self.STALE
            or abs(speed / last.prices.step - 1.0) > self.CHANGED
        ):
            self.last, self.age = self.offer(costs, rows, speed, drafting), 0
            self.rows, self.drafting = rows, drafting
            return self.last
        return last

    def offer(self, costs: StepCosts, rows: int, speed: float, drafting: int) -> Budget:
        """All depth and nodes, at the price of the tokens that `speed` writes in their time.

        Of `rows` that share the forward so many are `drafting`: each bears its part of what the
        others wait for its levels and nodes. A second itself is worth what a row writes in it.
        """
        second = speed / costs.plain(rows)
        rate = second * rows / drafting
        level = rate * (costs.draft.at(4) - costs.draft.at(2)) / 2.0
        curve, drift = costs.rest.reach(rows * (1 + self.max_nodes))
        scale, none = rate * drift, curve[rows]
        sizes = curve[rows::drafting][: self.max_nodes + 1]
        # A larger forward is never cheaper: where it was measured so, that was noise.
        nodes = tuple([scale * (seconds - none) for seconds in accumulate(sizes, max)])
        prices = Prices(max(level, 0.0), nodes, speed, second)
        return Budget(self.max_depth, self.max_nodes, prices)


class Shapes:
    """The node budget of a tree from the chances of its ranks, refreshed now and then."""

    def __init__(self, max_depth: int, max_nodes: int, margin: float, half_life: float) -> None:
        self.max_depth, self.max_nodes, self.margin = max_depth, max_nodes, margin
        self.fade = 0.5 ** (1.0 / half_life)
        self.age = 0  # steps since the last change of regime
        self.rows = 0, 0  # and how many of them draft
        self.choice = NONE
        self.curve = [0.0]  # accepted tokens the static shape promises, by nodes
        self.promised = self.found = 2.0

    def update(self, accepted: int, nodes: int) -> None:
        """Compare what a grown tree brought with what the best static one promised."""
        if len(self.curve) > 1:
            self.promised = self.promised * self.fade + self.curve[min(nodes, len(self.curve) - 1)]
            self.found = self.found * self.fade + accepted

    def best(self, ranks: Ranks, costs: StepCosts, rows: int, drafting: int) -> Budget:
        """The budget with the most tokens per second, where so many of all `rows` of a step are
        drafting; found again at ages 1, 2, 4, 8, ...
        """
        self.age += 1
        if (rows, drafting) == self.rows and self.age % 32 and self.age & (self.age - 1):
            return self.choice
        self.rows = rows, drafting
        rates = ranks.rates(WIDTH, BELIEF, 2.0)
        lift = min(max(self.found / self.promised, 0.25), 2.0)
        best_rate = self.margin / costs.plain(rows)
        self.choice, depth = NONE, 1
        while depth <= self.max_depth:
            shape = best_first_shape(rates, self.max_nodes, depth)
            curve = list(accumulate(shape.values[1:], initial=0.0))
            for nodes in range(1, len(curve)):
                seconds = costs.drafted(rows, depth, drafting * nodes)
                rate = (1.0 + lift * curve[nodes] * drafting / rows) / seconds
                if rate > best_rate:
                    best_rate, self.curve = rate, curve
                    self.choice = Budget(depth, nodes)
            depth += 1 if depth < 4 else 2
        return self.choice
