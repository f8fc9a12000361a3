"""The target's first layers guess; which ones, and how far, follows what all layers would have said
(DEL, arXiv 2504.05598).

Every scored token left a hidden state behind each layer. The head reads them all: how often a
layer names the target's token gives its acceptance, and how sure it was when right and when wrong
gives the confidence at which its draft should stop. No forward is made for that. Everything is
decided from past rounds and tokens already drawn, so the law of the text stays the target's.

Where we differ: the paper counts layers, as if scoring more tokens were free. Under a budget with
prices the exit, the length and the end of a draft follow what they cost on this machine. It looks
at every layer in every round; here a few of the first half are looked at every few rounds, which is
cheaper than what it loses (`every_exit` and `look_every` are the paper's), and a model whose exits
can never pay (`parts.exit_evidence`) is not looked at any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.growers.chain import ChainGrowth
from foretoken.drafters.growers.grower import Grower, Growth
from foretoken.drafters.parts.exit_evidence import ENOUGH, evidence_of
from foretoken.drafters.parts.part_of_target import EarlyExitModel
from foretoken.errors import check_values
from foretoken.lm.views.layer_predictions import LayerPredictions
from foretoken.lm.views.wrapping import layers_of
from foretoken.trees.worth import Calibration
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Layer,
    Prices,
    Rows,
    Scores,
    Step,
    Taps,
    Traits,
)


class ExitGrowth(ChainGrowth):
    """One row's chain behind the exit that its counts chose."""

    def __init__(self, row: DecodeState, depth: int, counts: Counts, confident: bool) -> None:
        super().__init__(row, depth)
        self.counts, self.confident = counts, confident
        self.chances = [1.0]  # that the target comes as far as each node

    def taken(self, score: Scores) -> bool:
        """Unless the token was unlikely, before any sampling option: it stays drafted.

        What is unlikely was learned at temperature 1, so that is what it is compared with.
        """
        counts, sure = self.counts, self.sure(score)
        self.chances.append(self.chances[-1] * counts.chance(sure))
        if not self.confident or not counts.stops:
            return True
        return counts.go_on(len(self.tokens), sure, self.chances[-1])

    def draft(self) -> Draft:
        return replace(super().draft(), chances=tuple(self.chances))


EXITS = 4  # of the first half, evenly spaced: behind more even perfect drafts save too little
LEAST_READ, MOST_READ = 8, 32  # tokens at the end of a prompt
AT_ONCE = 8.0  # rows of a product that take about as long as one


class DynamicExit(Grower):
    """A chain behind the layer that promises most tokens per layer run, or above their price."""

    traits = Traits(frozenset({Draw.POINT, Draw.IID}), prices=True)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        candidates: tuple[int, ...] | None = None  # exits considered; None: as `every_exit` says
        every_exit: bool = False  # behind every layer, as in the paper; False: some of one half
        decay: float = 0.95  # of all counts, per round
        most: int = 18  # tokens of the longest draft
        # tokens at the prompt's end that the first counts are made of; None: as many as the head
        # reads, behind all exits, in about a plain step, and 8 to 32
        look_back: int | None = None
        confident: bool = True  # stop a draft at low confidence; False: at the best fixed length
        look_every: int = 4  # rounds between looks at all layers, at the head's price; paper 1

    def __init__(self, target: LanguageModel, config: Config | None = None) -> None:
        self.config = config = config or self.Config()
        check(config)
        self.exits = ChosenLayers(target, config)
        super().__init__(self.exits)

    @property
    def hopeless(self) -> bool:
        """Whether every exit of this model is right less often than it costs of a forward."""
        return self.exits.evidence.hopeless(self.exits.prices)

    def reading(self) -> Taps:
        return self.traits.taps if self.exits.look_due else ()

    def observe(self, step: Step) -> None:
        super().observe(step)
        self.exits.round_over(step.rows)

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        # What other texts taught may not change the one that a seed repeats.
        if budget.prices is not None and not row.repeatable and self.hopeless:
            return None
        counts, config = self.exits.asked(row), self.config
        counts.choose(budget)
        length = counts.length
        if length and counts.learned and config.confident:
            length = config.most  # confidence ends the draft
        if length == 0:
            return None
        return ExitGrowth(row, min(depth, length), counts, config.confident)


class ChosenLayers(EarlyExitModel):
    """As many of the target's first layers as each text's counts choose."""

    def __init__(self, target: LanguageModel, config: DynamicExit.Config) -> None:
        layers = layers_of(target)
        exits = tuple(sorted(config.candidates or considered(layers, config.every_exit)))
        super().__init__(target, exits)
        self.taps = tuple(Layer(depth - 1) for depth in (*exits, layers))
        self.config = config
        head: float = self.view.head
        # of a forward, for one token behind each exit
        self.prices = [(depth + head) / (layers + head) for depth in exits]
        self.looked_back = config.look_back or read_at_once(layers, head, len(self.taps))
        self.context = max(self.looked_back, ENOUGH)
        self.evidence = evidence_of(target, exits)
        self.look_due = False  # in the step under way

    def counts(self, row: DecodeState) -> Counts:
        counts: Counts = row.private[self]
        return counts

    def depth(self, row: DecodeState) -> int:
        return self.counts(row).exit

    def asked(self, row: DecodeState) -> Counts:
        """The counts of a row that is asked for a draft, the prompt's end among them."""
        counts = self.counts(row)
        if counts.prompt is not None:
            counts.learn(self.view.predictions([counts.prompt])[0])
            counts.prompt = None
        counts.asked = True
        self.look_due |= counts.due
        return counts

    def rehearsed(
        self, row: DecodeState, seen: Features | None, right: int, asked: int, price: float
    ) -> None:
        """Take the text for evidence. It chooses its exits, so its guesses tell of few of them."""
        if seen is not None:
            self.witness(seen)
        self.hopeless = self.evidence.hopeless(self.prices)

    def witness(self, states: Features) -> None:
        """Take a text's end for evidence, as long as that is wanted."""
        if not self.evidence.complete:
            self.evidence.add(self.view.predictions([states[-ENOUGH:]])[0].tokens)

    def open(self, row: DecodeState, features: Features | None) -> bool:
        if not super().open(row, features):
            return False
        row.private[self] = counts = Counts(self.view, self.config)
        if features is None or not len(features):
            return True
        end = features[-self.looked_back :]
        if row.rehearsal:
            counts.learn(self.view.predictions([end])[0])
            return True
        counts.prompt = end
        self.witness(features)
        return True

    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        """Learn from the text that was scored, where the row had been asked for a draft."""
        learning, states = [], []
        for row, seen in zip(rows, features, strict=True):
            counts = self.counts(row)
            if not (counts.asked and seen is not None and counts.due):
                continue
            if row.repeatable:  # alone: company in a product may change last bits
                counts.learn(self.view.predictions([seen])[0])
            else:
                learning.append(counts)
                states.append(seen)
        if learning:
            for counts, said in zip(learning, self.view.predictions(states), strict=True):
                counts.learn(said)

    def round_over(self, rows: Rows) -> None:
        """Rounds are counted by row, whoever else looks at its layers in the same step."""
        self.look_due = False
        for row in rows:
            counts: Counts | None = row.private.get(self)
            if counts is not None:
                counts.rounds += counts.asked
                counts.asked = False


class Counts:
    """What is known of one text: per exit, how often it was right, and how sure it was.

    `counted` [4, E] are hits, misses, and the sums of the confidence at hits and at misses.
    """

    def __init__(self, view: Any, config: DynamicExit.Config) -> None:
        self.config, self.layers = config, view.layers
        self.depths: tuple[int, ...] = view.depths  # of the exits
        self.marks = torch.tensor(view.depths, dtype=torch.float64)
        self.counted = self.marks.new_zeros(4, len(self.marks))
        self.share = self.counted[0]  # of tokens that were right
        self.lengths = torch.arange(config.most, dtype=torch.float64)
        self.steps = (self.marks + view.head) / (view.layers + view.head)  # of a whole forward
        self.calibration = [Calibration() for _ in self.depths]
        self.rounds, self.learned, self.asked = 0, False, False  # rounds that it was asked in
        self.prompt: Tensor | None = None  # states of its end, until somebody asks
        self.index, self.length, self.threshold = 0, 1, -math.inf
        self.exit: int = self.depths[0]
        self.prices: Prices | None = None

    @property
    def due(self) -> bool:
        """Whether all layers are looked at in this round, if the row is asked for a draft."""
        return self.rounds % self.config.look_every == 0

    def learn(self, said: LayerPredictions) -> None:
        """Count what every exit said at each place against what the last layer said there."""
        right = (said.tokens[:, :-1] == said.tokens[:, -1:]).double()  # [n, E]
        sure = said.sure[:, :-1].double()
        fresh = torch.stack([right, 1 - right, sure * right, sure * (1 - right)]).sum(1).cpu()
        self.counted = self.config.decay * self.counted + fresh
        hits, misses = self.counted[:2]
        self.share, self.learned = hits / (hits + misses).clamp_min(1e-9), True
        for laws, hits in zip(sure.tolist(), right.tolist(), strict=True):
            for calibration, law, hit in zip(self.calibration, laws, hits, strict=True):
                calibration.tried(law, 0, False, hit)

    def choose(self, budget: Budget) -> None:
        """The exit and length of the next draft: of most tokens per layer run (token-per-layer,
        equation 4), or of most tokens above their price; of the lengths that the budget allows.
        """
        self.prices = prices = budget.prices
        if not self.learned:
            return
        longest = min(self.config.most, min(budget.depth, budget.nodes) + 1)  # from 0 on
        if prices is not None:
            longest = min(longest, len(prices.nodes))
        lengths = self.lengths[:longest]
        tokens = (self.share[:, None] ** lengths).cumsum(1)  # [E, d]
        if prices is not None:
            nodes = lengths.new_tensor(prices.nodes[:longest])
            worth = tokens - prices.step * lengths * self.steps[:, None] - nodes
        else:
            worth = tokens / (lengths * self.marks[:, None] + self.layers)
        self.index, self.length = divmod(int(worth.argmax()), longest)
        self.exit = self.depths[self.index]
        self.threshold = -math.inf  # nothing to tell right from wrong by, yet
        hits, misses, sure_hits, sure_misses = self.counted[:, self.index].tolist()
        if hits > 0.0 and misses > 0.0:
            self.threshold = (sure_hits / hits + sure_misses / misses) / 2

    @property
    def stops(self) -> bool:
        """Whether confidence can end the draft under way."""
        return self.learned and (self.prices is not None or self.threshold > -math.inf)

    def chance(self, sure: float) -> float:
        """How likely a token of the probability `sure` is the target's, if all before it are."""
        return self.calibration[self.index].chance(sure, 0, False)

    def go_on(self, drafted: int, sure: float, reached: float) -> bool:
        """Whether a token may follow the last of `drafted` ones, of probability `sure`: above the
        threshold or, where tokens have prices, if the next one pays, given the chance that the
        target comes as far as the last.
        """
        if self.prices is None:
            return sure >= self.threshold
        nodes = self.prices.nodes
        if drafted + 1 >= len(nodes):
            return False
        price = self.prices.step * float(self.steps[self.index])
        price += nodes[drafted + 1] - nodes[drafted]
        return reached * float(self.share[self.index]) >= price


def considered(layers: int, every: bool) -> tuple[int, ...]:
    """The exits of a model of so many layers, as layers run; at least one."""
    if every:
        return tuple(range(1, max(layers, 2)))
    half = max(layers // 2, 1)
    count = min(EXITS, half)
    return tuple(-(-half * place // count) for place in range(1, count + 1))


def read_at_once(layers: int, head: float, marks: int) -> int:
    """Places that a head, as dear as so many layers, reads behind all marks in a plain step."""
    free = AT_ONCE * (layers + head) / (marks * max(head, 1e-9))
    return int(min(max(free, LEAST_READ), MOST_READ))


def check(config: DynamicExit.Config) -> None:
    """ConfigError for numbers that make no sense."""
    check_values(
        config,
        ("decay", 0.0 < config.decay <= 1.0, "above 0, at most 1"),
        ("most", config.most >= 1, "1 or more"),
        ("look_back", config.look_back is None or config.look_back >= 1, "1 or more"),
        ("look_every", config.look_every >= 1, "1 or more"),
    )
