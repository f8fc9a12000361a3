"""How much tree pays: a budget of nodes for drafters that fill it, prices for drafters that choose.

Both maximise tokens per second. A drafter that knows the chance of each of its nodes is told what
nodes and levels cost and decides by itself, draft by draft; for the others the best static shape
is found from the running chances of ranks (optimal trees, arXiv 2606.01813).
"""

from __future__ import annotations

from itertools import accumulate

from foretoken.controllers.prices import Prices
from foretoken.controllers.survival import BELIEF, Ranks
from foretoken.trees.select import best_first_shape
from foretoken.types import Budget

WIDTH = 8  # ranks of children told apart
NONE = Budget(0, 0)


class Pace:
    """Tokens per row, and time in plain steps, of some steps; old ones count less."""

    __slots__ = ("fade", "spent", "steps", "tokens")

    def __init__(self, half_life: float) -> None:
        self.fade = 0.5 ** (1.0 / half_life)
        self.tokens = self.spent = self.steps = 0.0

    def update(self, tokens: float, plain_steps: float) -> None:
        self.tokens = self.tokens * self.fade + tokens
        self.spent = self.spent * self.fade + plain_steps
        self.steps = self.steps * self.fade + 1.0

    def scale(self, factor: float) -> None:
        """Believe what was seen so far `factor` times as much."""
        self.tokens *= factor
        self.spent *= factor
        self.steps *= factor

    def gain(self, speed: float) -> float:
        """Tokens above what their time is worth at `speed`, of all these steps."""
        return self.tokens - speed * self.spent


class Bargain:
    """Prices in tokens from the speed that drafting reaches.

    The most tokens per second is the fixed point of Dinkelbach's iteration (1967): maximise tokens
    minus speed times seconds, where the speed is the one that this choice reaches.
    """

    HOPE = 1.5  # speed-up assumed at first, worth two steps
    TRIALS = 2.0

    def __init__(self, max_depth: int, max_nodes: int, margin: float, half_life: float) -> None:
        self.max_depth, self.max_nodes, self.margin = max_depth, max_nodes, margin
        self.pace = Pace(half_life)

    @property
    def speed(self) -> float:
        """Tokens per row in the time of one plain step."""
        return (self.pace.tokens + self.TRIALS * self.HOPE) / (self.pace.spent + self.TRIALS)

    def offer(self, prices: Prices, rows: int, speed: float) -> Budget:
        """All depth and nodes, at the price of the tokens that `speed` writes in their time."""
        rate = speed / prices.plain(rows)
        level = rate * (prices.draft.at(4) - prices.draft.at(2)) / 2.0
        curve, drift = prices.rest.reach(rows * (1 + self.max_nodes))
        scale, none = rate * drift, curve[rows]
        sizes = curve[rows::rows][: self.max_nodes + 1]
        # A larger forward is never cheaper: where it was measured so, that was noise.
        nodes = [scale * (seconds - none) for seconds in accumulate(sizes, max)]
        return Budget(self.max_depth, self.max_nodes, max(level, 0.0), tuple(nodes), speed)


class Shapes:
    """The node budget of a tree from the chances of its ranks, refreshed now and then."""

    def __init__(self, max_depth: int, max_nodes: int, margin: float, half_life: float) -> None:
        self.max_depth, self.max_nodes, self.margin = max_depth, max_nodes, margin
        self.fade = 0.5 ** (1.0 / half_life)
        self.age = 0  # steps since the last change of regime
        self.rows = 0
        self.choice = NONE
        self.curve = [0.0]  # accepted tokens the static shape promises, by nodes
        self.promised = self.found = 2.0

    def update(self, accepted: int, nodes: int) -> None:
        """Compare what a grown tree brought with what the best static one promised."""
        if len(self.curve) > 1:
            self.promised = self.promised * self.fade + self.curve[min(nodes, len(self.curve) - 1)]
            self.found = self.found * self.fade + accepted

    def best(self, ranks: Ranks, prices: Prices, rows: int) -> Budget:
        """The budget with the most tokens per second; found again at ages 1, 2, 4, 8, ..."""
        self.age += 1
        if rows == self.rows and self.age % 32 and self.age & (self.age - 1):
            return self.choice
        self.rows = rows
        rates = ranks.rates(WIDTH, BELIEF, 2.0)
        lift = min(max(self.found / self.promised, 0.25), 2.0)
        best_rate = self.margin / prices.plain(rows)
        self.choice, depth = NONE, 1
        while depth <= self.max_depth:
            shape = best_first_shape(rates, self.max_nodes, depth)
            curve = list(accumulate(shape.values[1:], initial=0.0))
            for nodes in range(1, len(curve)):
                seconds = prices.drafted(rows, depth, rows * nodes)
                rate = (1.0 + lift * curve[nodes]) / seconds
                if rate > best_rate:
                    best_rate, self.curve = rate, curve
                    self.choice = Budget(depth, nodes)
            depth += 1 if depth < 4 else 2
        return self.choice
