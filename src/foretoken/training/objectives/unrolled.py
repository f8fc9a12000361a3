"""EAGLE-3's training-time test: a head learns laws along its own outputs (arXiv 2503.01840).

Step 0 reads the target's states at every token of a text, as where a draft begins. Step s reads
what the head itself said one token before in step s - 1, as s levels below: there it sees the text
up to where that draft would have begun, and its own tokens since.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from foretoken.engine.session import Session
from foretoken.errors import check_values
from foretoken.lm.views.view import innermost
from foretoken.training.captures.texts import fused_layers
from foretoken.training.drafts.shape import projected
from foretoken.training.drafts.words import frequent
from foretoken.training.features import Features
from foretoken.training.objectives.guessing import GuessObjective, GuessTraining
from foretoken.training.objectives.sparse_laws import SparseCrossEntropy

FADING = 0.8  # weight of a step's loss, as a part of the one before; paper 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class UnrolledTraining(GuessTraining):
    """EAGLE-3's settings (arXiv 2503.01840), for a head that is narrower than its target."""

    rate: float = 3e-3  # peak learning rate
    matrix_rate: float = 0.02  # peak rate of Muon, for matrices inside; 0: AdamW for all
    width: int = 256  # of the head, a multiple of 64
    layers: int = 1  # decoder layers; paper 1
    taps: tuple[int, ...] | None = None  # layers it reads; none: a low, a middle and a high one
    vocabulary: int = 16384  # tokens it scores: the most frequent of the target's text
    unrolled: int = 4  # steps, the first on the target's states; paper 5 to 7
    likeliest: int = 16  # tokens of the target's laws that it learns from

    def __post_init__(self) -> None:
        GuessTraining.__post_init__(self)
        for name in ("layers", "vocabulary", "unrolled", "likeliest"):
            check_values(self, (name, getattr(self, name) >= 1, "1 or more"))
        check_values(
            self,
            ("width", self.width >= 64 and self.width % 64 == 0, "a multiple of 64"),
            ("taps", self.taps is None or min(self.taps, default=-1) >= 0, "layers, from 0 on"),
        )


class UnrolledObjective(GuessObjective):
    """Cross-entropy to the target's sparse laws, in every step."""

    def __init__(self, config: Any, train: Features) -> None:
        super().__init__(config, train)
        self.said = train.column("laws").flatten().long(), train.column("log_probs").flatten().exp()

    def shape(self, session: Session) -> dict[str, Any]:
        config, lm = self.config, innermost(session.target)
        self.counts = torch.zeros(lm.vocab_size, dtype=torch.float64)
        self.counts.index_add_(0, self.said[0], self.said[1].double())
        self.tokens = frequent(self.counts, config.vocabulary, session.eos)
        return {
            "taps": config.taps or fused_layers(lm.layers),
            "tokens": len(self.tokens) if len(self.tokens) < lm.vocab_size else 0,
            "width": config.width,
            "layers": config.layers,
            "heads": config.width // 64,
            "inner": 4 * config.width,
        }

    def begin(self, head: Any, session: Session) -> None:
        """Layers begin as the identity, ends as the target's in their strongest directions."""
        super().begin(head, session)
        self.rows = torch.full_like(self.counts, -1, dtype=torch.long)
        self.rows[self.tokens] = torch.arange(len(self.tokens))
        width, every = self.config.width, torch.arange(len(self.counts))
        table = self.ends.embed(every).float()
        with torch.no_grad():
            head.scored.copy_(self.tokens)
            known = projected(table, self.counts, width)
            head.embedding.weight.copy_(torch.linalg.lstsq(table, known, driver="gelsd")[0].T)
            output = projected(self.ends.weight.float(), self.counts, width)
            head.lm_head.weight.copy_(output[self.tokens])
            head.norm.weight.fill_(0.05)  # small first logits
            head.join.weight.copy_(torch.eye(width, 2 * width))
            for layer in head.layers:
                layer.joined.weight.zero_()
                layer.down.weight.zero_()

    def __call__(
        self, model: Any, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, agreed = self.steps(model, batch)
        loss = torch.stack([FADING**step * one for step, one in enumerate(losses)]).sum()
        return loss, {"loss": loss.detach(), **named(agreed)}

    def judge(self, head: Any, held_out: Features) -> dict[str, float]:
        """How often its best guess is the target's, by depth; shards count alike."""
        found = held_out.each(lambda texts: torch.stack(self.steps(head, texts)[1])[None])
        return named(found.mean(0).tolist())

    def steps(self, head: Any, batch: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Loss and agreement of every step."""
        ids, counts = batch["input_ids"], batch["weights"] > 0
        hidden, taps = batch["hidden"].float(), len(head.config.taps)
        target = hidden.view(*ids.shape, taps, hidden.shape[-1] // taps)
        chosen = self.rows[batch["laws"].long()]
        probs = batch["log_probs"].float().exp().masked_fill(chosen < 0, 0.0)
        losses, agreed = [], []
        outputs = unrolled(head, self.ends.embed(ids), head.fused(target), self.config.unrolled)
        told: Any = SparseCrossEntropy.apply
        for step, states in enumerate(outputs):
            taught = counts[:, 1:].clone()  # whose law is learnt at the token before
            taught[:, :step] = False
            said = head.norm(states[:, :-1][taught])
            loss, figures = told(
                said, head.lm_head.weight, chosen[:, 1:][taught], probs[:, 1:][taught]
            )
            losses.append(loss)
            agreed.append(figures[0])
        return losses, agreed


def named(agreed: Any) -> dict[str, Any]:
    return {f"depth_{depth}": value for depth, value in enumerate(agreed, 1)}


def unrolled(
    head: Any, embedded: Float[Tensor, "n T H"], fused: Float[Tensor, "n T W"], steps: int
) -> Iterator[Float[Tensor, "n T W"]]:
    """The head's outputs at every token, step by step."""
    count, length = embedded.shape[:2]
    positions = torch.arange(length, device=embedded.device).expand(count, -1)
    memories = [fused.new_zeros(count, 0, layer.memory_size) for layer in head.layers]
    before = fused
    for step in range(steps):
        entering = head.entering(embedded, F.pad(before[:, :-1], (0, 0, 1, 0)))
        sees = sight(length, step).to(embedded.device).expand(count, -1, -1)
        before, kept = head(entering, positions, sees, memories)
        memories = [torch.cat(pair, 1) for pair in zip(memories, kept, strict=True)]
        yield before


def sight(length: int, step: int) -> Bool[Tensor, "1 T (step+1)T"]:
    """Which tokens of all steps so far each token of this step sees."""
    ones = torch.ones(length, length, dtype=torch.bool)
    text = ones.tril(-step)
    own = [ones.tril(past - step).triu(past - step) for past in range(1, step + 1)]
    return torch.cat([text, *own], 1)[None]
