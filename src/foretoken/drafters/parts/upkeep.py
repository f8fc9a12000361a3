"""Whether what rides in every forward, to be of use later, pays for its nodes.

A column of a window brings nothing in the step that scores it: what it shows may be guessed in some
later one. Tokens brought per column ridden are held against the price of a column. Where they do
not reach it nothing rides, but for short bursts that a small share of all time pays for.
"""

from __future__ import annotations

from itertools import pairwise

from foretoken.types import Budget

EXPLORED = 0.01  # tokens per step that bursts may cost
PURSE = 2.0  # most that is saved up for one
BURST = 16  # steps of one, if that lasts so long
FADE = 0.5 ** (1 / 256)  # of what is known, per column ridden
PRIOR, WEIGHT = 0.02, 8.0  # tokens per column assumed at first, and the columns that this is worth


class Upkeep:
    """Tokens per column of `nodes` nodes, and what may be spent on finding out."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.brought = self.ridden = 0.0
        self.purse = 0.0
        self.burst = 0  # steps left of one

    @property
    def rate(self) -> float:
        """Tokens that a column brings."""
        return (self.brought + WEIGHT * PRIOR) / (self.ridden + WEIGHT)

    def columns(self, budget: Budget, before: int, most: int) -> int:
        """How many columns ride beside a draft of `before` nodes; none where nobody prices."""
        prices = budget.prices
        if prices is None or not most:
            return 0
        room = (min(budget.nodes, len(prices.nodes) - 1) - before) // self.nodes
        laid = [before + self.nodes * count for count in range(min(room, most) + 1)]
        costs = [prices.nodes[more] - prices.nodes[less] for less, more in pairwise(laid)]
        paying = next((at for at, cost in enumerate(costs) if cost > self.rate), len(costs))
        self.purse = min(self.purse + EXPLORED, PURSE)
        if not paying and costs:
            if not self.burst and self.purse >= min(BURST * costs[0], PURSE):
                self.burst = BURST
            if self.burst and self.purse < costs[0]:
                self.burst = 0
            if self.burst:
                self.burst -= 1
                self.purse -= costs[0]
                paying = 1
        return paying

    def update(self, brought: int, rode: int) -> None:
        """A step of so many columns is over, in which earlier ones brought so many tokens more."""
        fade = FADE**rode
        self.brought = self.brought * fade + brought
        self.ridden = self.ridden * fade + rode
