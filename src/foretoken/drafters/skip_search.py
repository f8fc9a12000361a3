"""Which sublayers the draft leaves out: a search on the text as it is written (SWIFT, section 4.1).

A set is judged by how many of the text's own first tokens the draft would have guessed. The best
set so far drafts, across all texts of a stream; worse ones leave no trace. What was tried never
depends on tokens not yet written, so the law of the text stays the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch

from foretoken.coins import SeededCoins
from foretoken.errors import ConfigError
from foretoken.lm.views import Skips
from foretoken.types import DecodeState


class Suggestions(Protocol):
    """A model of the scores of sets."""

    def register(self, skipped: frozenset[int], score: float) -> None: ...
    def suggest(self, size: int) -> frozenset[int]: ...


@dataclass(slots=True)
class SearchCost:
    """What searching took so far."""

    passes: int = 0  # draft forwards
    tokens: int = 0  # fed in them
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRules:
    """When to try, how to judge and when to stop."""

    ratio: float
    window: int
    interval: int
    bayes_interval: int
    most_tries: int
    patience: int
    good_enough: float
    seed: int


class SkipSearch:
    """The set in use, and tries at better ones until one is good enough or patience ends."""

    def __init__(self, view: Skips, rules: SearchRules, chosen: tuple[int, ...] | None) -> None:
        self.view, self.rules = view, rules
        self.size = int(view.units * rules.ratio)
        self.skipped = frozenset(odd_layers(view.units) if chosen is None else chosen)
        self.best = 0.0  # share of tokens guessed by the set in use
        self.tries = self.failures = self.rounds = 0
        self.done = chosen is not None or rules.interval == 0 or self.size == 0
        self.cost = SearchCost()
        self.coins = SeededCoins(rules.seed)  # its own: no text's coins are used
        self.model: Suggestions | None = None
        if not self.done and rules.bayes_interval:
            self.model = suggestions(view.units, rules.seed)

    def wants(self, row: DecodeState) -> bool:
        """Whether the row's text is long enough to be judged by."""
        return row.finish is None and len(row.new_tokens) > self.rules.window + 1

    def step(self, row: DecodeState) -> None:
        """Try one set on the first tokens of the row's text, and keep it if it is the best."""
        began = perf_counter()
        candidate, rules = self.propose(), self.rules
        score = self.judge(row, candidate)
        if self.model is not None:
            self.model.register(candidate, score)
        if score > self.best:
            self.skipped, self.best, self.failures = candidate, score, 0
        else:
            self.failures += 1
        self.tries += 1
        self.done = (
            self.best > rules.good_enough
            or self.failures > rules.patience
            or self.tries > rules.most_tries
        )
        self.cost.passes += 1
        self.cost.tokens += rules.window
        self.cost.seconds += perf_counter() - began

    def propose(self) -> frozenset[int]:
        """A random set, or now and then the one a model of all scores so far believes in."""
        every = self.rules.bayes_interval
        if self.model is not None and self.tries and (self.tries + 1) % every == 0:
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
        count = self.rules.window
        guessed = self.view.guesses(row, count, candidate)
        written = row.new_tokens[1 : count + 1]
        return sum(a == b for a, b in zip(guessed, written, strict=True)) / count


def odd_layers(units: int) -> list[int]:
    """Both sublayers of layers 1, 3, 5, ...: where a search starts."""
    return [unit for unit in range(units) if (unit // 2) % 2 == 0]


def suggestions(units: int, seed: int) -> Suggestions:
    """The Bayesian model, whose library is an optional extra."""
    try:
        from foretoken.drafters.bayesian import Process
    except ImportError as error:
        raise ConfigError(
            "a Bayesian search for skipped layers was asked for.",
            f"its library is not installed ({error}).",
            "install it: pip install 'foretoken[search]'; or pass bayes_interval=0.",
        ) from error
    return Process(units, seed)
