"""The target's first layers guess; which ones, and how far, follows what all layers would have said
(DEL, arXiv 2504.05598).

Every scored token left a hidden state behind each layer. The head reads them all: how often a
layer names the target's token gives its acceptance, and how sure it was when right and when wrong
gives the confidence at which its draft should stop. No forward is made for that. Everything is
decided from past rounds and tokens already drawn, so the law of the text stays the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.drafters.chains import Chain, ChainDrafter
from foretoken.errors import check_values
from foretoken.lm.shadow import Shadow
from foretoken.lm.views import exits
from foretoken.types import Budget, DecodeState, Draft, LanguageModel, Scores, Verdict


class DynamicExit(ChainDrafter):
    """A chain behind the layer that promises most tokens per layer run."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        candidates: tuple[int, ...] | None = None  # exits considered; None: behind every layer
        decay: float = 0.95  # of all counts, per round
        most: int = 18  # tokens of the longest draft
        look_back: int = 32  # tokens at the prompt's end that the first counts are made of
        confident: bool = True  # stop a draft at low confidence; False: at the best fixed length
        look_every: int = 1  # rounds between looks at all layers, which cost the head's arithmetic

    def __init__(self, target: LanguageModel, config: Config | None = None) -> None:
        self.config = config or self.Config()
        check(self.config)
        self.view = exits(target, self.config.candidates, self.config.look_back)
        self.max_length = target.max_length
        self.depths = torch.tensor(self.view.marks, dtype=torch.float64)

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        row.draft = counts = Counts(self.depths, self.view.layers, self.config)
        states = self.view.seen(row)
        if states is not None and len(states):
            counts.learn(self.view.shadows([states])[0])

    def allowed(self, row: DecodeState, budget: Budget) -> int:
        depth = super().allowed(row, budget)
        counts: Counts = row.draft
        length = counts.length
        if length and counts.learned and self.config.confident:
            length = self.config.most  # confidence ends the draft
        if depth > 0 and length == 0:
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

        The threshold was learned at temperature 1, so that is what it is compared with.
        """
        threshold: float = chain.row.draft.threshold
        if not self.config.confident or threshold == -math.inf:
            return True
        return float(logits.float().softmax(-1)[chain.tokens[-1]]) >= threshold

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

    __slots__ = ("config", "costs", "depths", "exit", "hits", "layers", "learned", "length",
                 "misses", "rounds", "sure_hits", "sure_misses", "threshold")  # fmt: skip

    def __init__(self, depths: Float[Tensor, "E"], layers: int, config: DynamicExit.Config) -> None:
        self.config, self.depths, self.layers = config, depths, layers
        self.hits, self.misses, self.sure_hits, self.sure_misses = depths.new_zeros(4, len(depths))
        lengths = torch.arange(config.most, dtype=torch.float64)
        self.costs = lengths * depths[:, None] + layers  # [E, d]: layers run to draft d and score
        self.rounds, self.learned = 0, False
        self.exit, self.length, self.threshold = int(depths[0]), 1, -math.inf  # to begin with

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
        self.choose()

    def choose(self) -> None:
        """The exit and length of most tokens per layer run (token-per-layer, equation 4)."""
        share = self.hits / (self.hits + self.misses).clamp_min(1e-9)
        tokens = (share[:, None] ** torch.arange(self.config.most)).cumsum(1)  # [E, d]
        best = int((tokens / self.costs).argmax())
        index, self.length = divmod(best, self.config.most)
        self.exit = int(self.depths[index])
        self.threshold = -math.inf  # nothing to tell right from wrong by, yet
        hits, misses = float(self.hits[index]), float(self.misses[index])
        if hits > 0.0 and misses > 0.0:
            right, wrong = float(self.sure_hits[index]) / hits, float(self.sure_misses[index])
            self.threshold = (right + wrong / misses) / 2


def check(config: DynamicExit.Config) -> None:
    """ConfigError for numbers that make no sense."""
    check_values(
        config,
        ("decay", 0.0 < config.decay <= 1.0, "above 0, at most 1"),
        ("most", config.most >= 1, "1 or more"),
        ("look_back", config.look_back >= 1, "1 or more"),
        ("look_every", config.look_every >= 1, "1 or more"),
    )
