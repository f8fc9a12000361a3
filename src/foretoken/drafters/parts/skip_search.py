"""Which sublayers the draft leaves out: a search on the text as it is written (SWIFT, section 4.1).

A set is judged by how many of the text's own first tokens the draft would have guessed. The best
set so far drafts, across all texts of a stream; worse ones leave no trace. What was tried never
depends on tokens not yet written, so the law of the text stays the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

import torch

from foretoken.coins import SeededCoins
from foretoken.drafters.parts.bayesian import Process
from foretoken.errors import check_values
from foretoken.lm.views.skipped_layers import SkippedLayers
from foretoken.lm.views.table_views import TableSkippedLayers
from foretoken.types import DecodeState, Rows

View = SkippedLayers | TableSkippedLayers


LONGEST = 12  # tokens of the drafts that a set's promise is reckoned with
REHEARSAL = 5.0  # seconds of trying before there are texts
FEW = 4  # tries that tell how long they take: the first forwards of a kind take longer
FAMILIAR = 0.25  # share of a drawn text that the target itself must have guessed
OWN = 32  # rounds between tries on a text that must repeat: there the clock may not choose
SURPRISE = 2.0  # times the mean of the tries so far: a longer one was disturbed


@dataclass(slots=True)
class SearchCost:
    """What searching took so far, and the rounds beside it."""

    passes: int = 0  # draft forwards
    tokens: int = 0  # fed in them
    seconds: float = 0.0
    beside: float = 0.0  # seconds of the rounds that went by meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipConfig:
    """How a target drafts with sublayers left out, and how they are searched for."""

    skip_ratio: float = 0.45  # of the sublayers between the first and the last layer
    skip: tuple[int, ...] | None = None  # a set known to be good: nothing is searched
    stop_below: float = 0.8  # a draft ends with a token less sure than this; under prices with one
    # behind which the next would not pay
    window: int = 32  # first tokens of a text that a set is judged by
    search_interval: int = 1  # rounds between tries at least; 0: never; paper 1
    search_share: float = 0.03  # of the time that tries may take; paper: any
    bayes_interval: int = 4  # every n-th try is suggested by a Gaussian process; 0: none; paper 25
    most_tries: int = 1000  # the search ends after so many
    patience: int = 300  # tries in a row that find nothing better, then the search ends
    good_enough: float = 0.95  # it ends as well when the draft guesses this share
    # tries; it ends if no draft of the best set could pay by then; paper: never
    hopeless_after: int = 48
    seed: int = 1  # of the search

    def check(self, units: int) -> None:
        """ConfigError for numbers that make no sense with that many sublayers."""
        wrong = [unit for unit in self.skip or () if not 0 <= unit < units]
        check_values(
            self,
            ("skip_ratio", 0.0 <= self.skip_ratio < 1.0, "0 or more, below 1"),
            ("skip", not wrong, f"sublayers from 0 to {units - 1}"),
            ("window", self.window >= 1, "1 or more"),
            ("search_interval", self.search_interval >= 0, "0 (never) or more"),
            ("search_share", self.search_share > 0.0, "above 0"),
            ("bayes_interval", self.bayes_interval >= 0, "0 (never) or more"),
        )


class SkipSearch:
    """The set in use, and tries at better ones until one is good enough or patience ends."""

    def __init__(self, view: View, config: SkipConfig, counted: bool = False) -> None:
        self.view, self.config, self.counted = view, config, counted
        self.size = int(view.units * config.skip_ratio)
        self.skipped = frozenset(odd_layers(view.units) if config.skip is None else config.skip)
        self.best = 0.0  # share of tokens guessed by the set in use
        self.tries = self.failures = self.rounds = 0
        self.done = config.skip is not None or config.search_interval == 0 or self.size == 0
        self.cost = SearchCost()
        self.coins = SeededCoins(config.seed)  # its own: no text's coins are used
        self.model = Process(view.units, config.seed)

    def round_passed(self, rows: Rows, seconds: float) -> bool:
        """A round of these rows went by; now and then a set is tried on one's text."""
        if self.done:
            return False
        self.rounds += 1
        self.cost.beside += seconds
        row = None
        if self.due():
            row = next((row for row in rows if self.wants(row)), None)
        if row is not None:
            self.step(row)
        return row is not None

    def finds_nothing(self, row: DecodeState) -> bool:
        """Whether of as many sets as tell, tried on a text that was drawn, none would ever pay.

        The target's own favourites are not what was drawn either: that is allowed for. Nothing is
        concluded where this would take longer than some seconds.
        """
        enough = self.config.hopeless_after
        own = self.judge(row, frozenset()) if self.wants(row) else 0.0
        if own < FAMILIAR:
            return False
        while not self.done and self.tries < enough:
            self.step(row)
            if self.tries >= FEW and self.cost.seconds / self.tries * enough > REHEARSAL:
                return False
        return self.promised(min(self.best / own, 1.0)) < 1.0

    def due(self) -> bool:
        """Whether a try fits between the rounds, by their number and by the time it takes."""
        if self.counted:
            return self.rounds % max(self.config.search_interval, OWN) == 0
        if self.rounds % self.config.search_interval:
            return False
        cost = self.cost
        each = cost.seconds / cost.passes if cost.passes else 0.0
        return cost.seconds + each <= self.config.search_share * cost.beside

    def wants(self, row: DecodeState) -> bool:
        """Whether the row's text is long enough to be judged by, and memory for it is there."""
        window = self.config.window
        long = row.finish is None and len(row.new_tokens) > window + 1
        return long and self.view.fits(row, window)

    def step(self, row: DecodeState) -> None:
        """Try one set on the first tokens of the row's text, and keep it if it is the best."""
        began = perf_counter()
        candidate, config = self.propose(), self.config
        score = self.judge(row, candidate)
        self.model.register(candidate, score)
        if score > self.best:
            self.skipped, self.best, self.failures = candidate, score, 0
        else:
            self.failures += 1
        self.tries += 1
        self.done = (
            self.best > config.good_enough
            or self.failures > config.patience
            or self.tries > config.most_tries
            or (self.tries >= config.hopeless_after and self.promise < 1.0)
        )
        self.cost.passes += 1
        self.cost.tokens += config.window
        spent = perf_counter() - began
        if self.tries > FEW:  # a pause of the machine says nothing of the next try
            spent = min(spent, SURPRISE * self.cost.seconds / (self.cost.passes - 1))
        self.cost.seconds += spent

    @property
    def promise(self) -> float:
        """At most how many times plain's speed drafts with the best set reach."""
        return self.promised(self.best)

    def promised(self, share: float) -> float:
        """The same with a set that guesses this share of tokens.

        As if tokens were right independently, scoring more of them were free and the head, too.
        """
        units = self.view.units
        kept = 1.0 - self.size / (units + 4)
        tokens = accumulate((share**n for n in range(1, LONGEST)), initial=1.0)
        return max(expected / (1.0 + n * kept) for n, expected in enumerate(tokens) if n)

    def propose(self) -> frozenset[int]:
        """A random set, or now and then the one a model of all scores so far believes in."""
        every = self.config.bayes_interval
        if every and self.tries and (self.tries + 1) % every == 0:
            return self.model.suggest(self.size)
        return self.random_set()

    def random_set(self) -> frozenset[int]:
        """`size` sublayers, all sets alike."""
        left = torch.ones(self.view.units, dtype=torch.float64)
        chosen: list[int] = []
        while len(chosen) < self.size:
            chosen.append(self.coins.draw(left / left.sum()))
            left[chosen[-1]] = 0.0
        return frozenset(chosen)

    def judge(self, row: DecodeState, candidate: frozenset[int]) -> float:
        """Share of the text's first tokens that the draft would have guessed ("matchness")."""
        count = self.config.window
        guessed = self.view.guesses(row, count, candidate)
        written = row.new_tokens[1 : count + 1]
        return sum(a == b for a, b in zip(guessed, written, strict=True)) / count


def odd_layers(units: int) -> list[int]:
    """Both sublayers of layers 1, 3, 5, ...: where a search starts."""
    return [unit for unit in range(units) if (unit // 2) % 2 == 0]
