"""The target's first layers guess; which ones, and how far, follows what all layers would have said
(DEL, arXiv 2504.05598).

Every scored token left a hidden state behind each layer. The head reads them all: how often a
layer names the target's token gives its acceptance, and how sure it was when right and when wrong
gives the confidence at which its draft should stop. No forward is made for that. Everything is
decided from past rounds and tokens already drawn, so the law of the text stays the target's.

Where we differ: the paper counts layers, as if scoring more tokens were free. Under a budget with
prices the exit, the length and the end of a draft follow what they cost on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.drafters.chains import Chain, ChainDrafter
from foretoken.errors import check_values
from foretoken.lm.shadow import Shadow
from foretoken.lm.views import Exits, exits, layers_of
from foretoken.trees.worth import Trust
from foretoken.types import Budget, DecodeState, Draft, LanguageModel, Scores, Verdict


class DynamicExit(ChainDrafter):
    """A chain behind the layer that promises most tokens per layer run, or above their price."""

    valued = sparing = True

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        candidates: tuple[int, ...] | None = None  # exits considered; None: all of the first half
        decay: float = 0.95  # of all counts, per round
        most: int = 18  # tokens of the longest draft
        look_back: int = 32  # tokens at the prompt's end that the first counts are made of
        confident: bool = True  # stop a draft at low confidence; False: at the best fixed length
        look_every: int = 4  # rounds between looks at all layers, at the head's price; paper 1

    def __init__(self, target: LanguageModel, config: Config | None = None) -> None:
        self.config = config or self.Config()
        check(self.config)
        considered = self.config.candidates
        if considered is None:  # behind a deeper one even perfect drafts save less than half
            considered = tuple(range(1, max(layers_of(target) // 2, 1) + 1))
        self.view = exits(target, considered, self.config.look_back)
        self.max_length = target.max_length

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        row.draft = counts = Counts(self.view, self.config)
        states = self.view.seen(row)
        if states is not None and len(states):
            counts.learn(self.view.shadows([states])[0])

    def allowed(self, row: DecodeState, budget: Budget) -> int:
        depth = super().allowed(row, budget)
        if depth <= 0:
            return 0
        counts: Counts = row.draft
        counts.choose(budget)
        length = counts.length
        if length and counts.learned and self.config.confident:
            length = self.config.most  # confidence ends the draft
        if length == 0:
            self.view.attend(row)
        return min(depth, length)

    def grow(self, chains: Sequence[Chain]) -> list[Tensor]:
        return self.view.grow(
            [chain.row for chain in chains],
            [chain.feed for chain in chains],
            [chain.above for chain in chains],
            [chain.row.draft.exit for chain in chains],
        )

    def go_on(self, chain: Chain, logits: Tensor) -> bool:
        """Unless the token just taken was unlikely, before any sampling option: it stays drafted.

        What is unlikely was learned at temperature 1, so that is what it is compared with.
        """
        counts: Counts = chain.row.draft
        if not self.config.confident or not counts.stops:
            return True
        sure = float(logits.float().softmax(-1)[chain.tokens[-1]])
        return counts.go_on(len(chain.tokens), sure)

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        """Learn from the root and the accepted nodes; what follows a rejected one is beside the
        text."""
        learning, states = [], []
        for row, score, verdict in zip(rows, scores, verdicts, strict=True):
            counts: Counts = row.draft
            counts.rounds += 1
            if row.finish is not None or score.hidden is None:
                continue
            if (counts.rounds - 1) % self.config.look_every == 0:
                learning.append(counts)
                states.append(score.hidden[[0, *verdict.path]])
        if learning:
            for counts, shadow in zip(learning, self.view.shadows(states), strict=True):
                counts.learn(shadow)


class Counts:
    """What is known of one text: per exit, how often it was right, and how sure it was."""

    __slots__ = ("budget", "config", "exit", "hits", "index", "learned", "length", "lengths",
                 "marks", "misses", "reached", "rounds", "share", "steps", "sure_hits",
                 "sure_misses", "threshold", "trust", "view")  # fmt: skip

    def __init__(self, view: Exits, config: DynamicExit.Config) -> None:
        self.config, self.view = config, view
        self.marks = torch.tensor(view.marks, dtype=torch.float64)
        self.hits, self.misses, self.sure_hits, self.sure_misses = self.marks.new_zeros(
            4, len(view.marks)
        )
        self.share = self.marks.new_zeros(len(view.marks))
        self.lengths = torch.arange(config.most, dtype=torch.float64)
        self.steps = (self.marks + view.head) / (view.layers + view.head)  # of a whole forward
        self.trust = [Trust() for _ in view.marks]
        self.rounds, self.learned = 0, False
        self.index, self.exit, self.length, self.threshold = 0, view.marks[0], 1, -math.inf
        self.budget = Budget(0, 0)
        self.reached = 1.0  # the chance that the target comes as far as the draft under way

    def learn(self, shadow: Shadow) -> None:
        """Count what every exit said at each place against what the last layer said there."""
        right = (shadow.tokens[:, :-1] == shadow.tokens[:, -1:]).double()  # [n, E]
        sure = shadow.sure[:, :-1].double()
        decay = self.config.decay
        fresh = torch.stack([right, 1 - right, sure * right, sure * (1 - right)]).sum(1).cpu()
        self.hits = decay * self.hits + fresh[0]
        self.misses = decay * self.misses + fresh[1]
        self.sure_hits = decay * self.sure_hits + fresh[2]
        self.sure_misses = decay * self.sure_misses + fresh[3]
        self.learned = True
        self.share = self.hits / (self.hits + self.misses).clamp_min(1e-9)
        for said, hit in zip(sure.tolist(), right.tolist(), strict=True):
            for trust, law, was in zip(self.trust, said, hit, strict=True):
                trust.tried(law, 0, False, was)

    def choose(self, budget: Budget) -> None:
        """The exit and length of the next draft: of most tokens per layer run (token-per-layer,
        equation 4), or of most tokens above their price.
        """
        self.budget, self.reached = budget, 1.0
        if not self.learned:
            return
        tokens = (self.share[:, None] ** self.lengths).cumsum(1)  # [E, d]
        if budget.step_price:
            longest = min(self.config.most, len(budget.node_prices))
            nodes = self.lengths.new_tensor(budget.node_prices[:longest])
            drafting = budget.step_price * self.lengths[:longest] * self.steps[:, None]
            worth = tokens[:, :longest] - drafting - nodes
        else:
            longest = self.config.most
            worth = tokens / (self.lengths * self.marks[:, None] + self.view.layers)
        self.index, self.length = divmod(int(worth.argmax()), longest)
        self.exit = self.view.marks[self.index]
        self.threshold = -math.inf  # nothing to tell right from wrong by, yet
        hits, misses = float(self.hits[self.index]), float(self.misses[self.index])
        if hits > 0.0 and misses > 0.0:
            right = float(self.sure_hits[self.index]) / hits
            self.threshold = (right + float(self.sure_misses[self.index]) / misses) / 2

    @property
    def stops(self) -> bool:
        """Whether confidence can end the draft under way."""
        return self.learned and (bool(self.budget.step_price) or self.threshold > -math.inf)

    def go_on(self, drafted: int, sure: float) -> bool:
        """Whether a token may follow the last of `drafted` ones, of probability `sure`: above the
        threshold, or where the next one pays.
        """
        prices = self.budget.node_prices
        if not self.budget.step_price:
            return sure >= self.threshold
        if drafted + 1 >= len(prices):
            return False
        self.reached *= self.trust[self.index].chance(sure, 0, False)
        price = self.budget.step_price * float(self.steps[self.index])
        price += prices[drafted + 1] - prices[drafted]
        return self.reached * float(self.share[self.index]) >= price


def check(config: DynamicExit.Config) -> None:
    """ConfigError for numbers that make no sense."""
    check_values(
        config,
        ("decay", 0.0 < config.decay <= 1.0, "above 0, at most 1"),
        ("most", config.most >= 1, "1 or more"),
        ("look_back", config.look_back >= 1, "1 or more"),
        ("look_every", config.look_every >= 1, "1 or more"),
    )
