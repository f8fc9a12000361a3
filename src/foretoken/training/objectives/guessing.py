"""Heads that guess text from the target's hidden states: each brings its own loss over texts.

A head has `learn(texts, ends)`: the loss of a batch of texts and how often its guesses were the
target's tokens. Everything else that training takes is alike and stands here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.engine.session import Session
from foretoken.errors import check_values
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.family import decoder_of
from foretoken.lm.runtime.output_head import OutputHead
from foretoken.lm.views.view import innermost
from foretoken.training.config import TrainingConfig
from foretoken.training.drafts.words import frequent
from foretoken.training.features import Features, beside
from foretoken.training.heads import HeadObjective


@dataclass(frozen=True, kw_only=True, slots=True)
class GuessTraining(TrainingConfig):
    """What all heads that guess are trained with."""

    epochs: int = 20  # passes over the captured texts
    batch: int = 16  # texts in a step
    window: int = 128  # tokens read of a text, its prompt's end included
    vocabulary: int = 0  # tokens it scores: the most frequent of the target's text; 0: all
    states: Literal["kept", "asked"] = "kept"  # the target's: in files, or read anew (for a GPU)

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        check_values(
            self,
            ("window", self.window >= 2, "2 or more"),
            ("vocabulary", self.vocabulary >= 0, "0 (all tokens) or more"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepTraining(GuessTraining):
    """Of heads that stand for a depth each, such as Hydra's (arXiv 2402.05109)."""

    depth: int = 4  # places guessed behind the next token; paper 4

    def __post_init__(self) -> None:
        GuessTraining.__post_init__(self)
        check_values(self, ("depth", self.depth >= 1, "1 or more"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelTraining(DeepTraining):
    """Medusa-1's settings (arXiv 2401.10774): the target stays as it is."""

    blocks: int = 1  # residual blocks before each output layer; paper 1

    def __post_init__(self) -> None:
        DeepTraining.__post_init__(self)
        check_values(self, ("blocks", self.blocks >= 1, "1 or more"))


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureTraining(GuessTraining):
    """EAGLE's settings (arXiv 2401.15077), at a rate for small models."""

    noise: float = 0.1  # largest disturbance of the states read, against piled-up errors; paper 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchTraining(DeepTraining):
    """Chimera's settings (arXiv 2402.15758), at a rate for small models."""

    state_weight: float = 0.0  # of guessed states' distance from the target's; release 0

    def __post_init__(self) -> None:
        DeepTraining.__post_init__(self)
        check_values(self, ("state_weight", self.state_weight >= 0, "0 (laws alone) or more"))


class Ends:
    """The target's input embeddings and output head, frozen, for losses to go through.

    `scored` are the tokens whose laws are learnt, all where it is None: `ids` of the outputs, and
    `places`, the outputs by token, -1 where there is none. They lie on `device`, or on the
    target's.
    """

    @torch.no_grad()
    def __init__(
        self,
        lm: LanguageModel,
        scored: Int[Tensor, "n"] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.lm, self.head, self.scored = lm, None, scored
        layer: Callable[[Tensor], Tensor] = lm.unembed
        if isinstance(lm, CachedLM):
            self.head = OutputHead(lm.model, decoder_of(lm.model))
            layer = self.head.head
        # Asked for unit vectors: a layer whose weights are packed has none to look at.
        units = torch.eye(lm.hidden_size).to(lm.embed([0]))
        bias = layer(torch.zeros_like(units[:1])).float()
        rows = torch.arange(lm.vocab_size) if scored is None else scored
        place, rows = device or bias.device, rows.to(bias.device)
        self.bias = bias[0][rows].to(place)
        self.weight = (layer(units).float() - bias).T[rows].contiguous().to(place)  # [k H]
        self.ids = rows = rows.to(place)
        self.places = rows.new_full((lm.vocab_size,), -1)
        self.places[rows] = torch.arange(len(rows), device=rows.device)

    def embed(self, tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n H"]:
        """Input embeddings."""
        found = self.lm.embed(tokens.flatten().tolist()).clone()
        return found.view(*tokens.shape, -1).to(self.weight)

    def unembed(self, states: Float[Tensor, "*n H"]) -> Float[Tensor, "*n k"]:
        """Logits of the tokens scored; gradients pass to the states."""
        logits = F.linear(states, self.weight, self.bias)
        return logits if self.head is None else self.head.shaped(logits)


class GuessObjective(HeadObjective):
    """The head's own loss, through the ends of the session's target."""

    anywhere = True
    config: Any

    def __init__(self, config: Any, train: Features) -> None:
        super().__init__(config, train)
        self.train = train

    def begin(self, head: Any, session: Session) -> None:
        target = innermost(session.target)
        if 0 < self.config.vocabulary < target.vocab_size:
            counts = self.train.mass(target.vocab_size)
            self.scored = frequent(counts, self.config.vocabulary, session.eos)
        self.ends = Ends(target, self.scored, next(head.parameters()).device)

    def __call__(
        self, model: Any, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, right = self.learnt(model, batch, rng)
        return loss, {"loss": loss.detach(), **right}

    def learnt(
        self, head: Any, texts: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The head's loss on texts, and how often its guesses were right."""
        found: tuple[Tensor, dict[str, Tensor]] = head.learn(texts, self.ends)
        return found

    def judge(self, head: Any, held_out: Features) -> dict[str, float]:
        """How often guesses are the target's tokens; shards count alike."""
        names: list[str] = []

        def right(texts: dict[str, Tensor]) -> Tensor:
            found = self.learnt(head, beside(head, texts), random.Random(0))[1]
            names[:] = found
            return torch.stack(list(found.values()))[None]

        shares = held_out.each(right).mean(0).tolist()
        return dict(zip(names, shares, strict=True))


class DeepObjective(GuessObjective):
    """Of heads that stand for a depth each."""

    def shape(self, session: Session) -> dict[str, Any]:
        return {"depth": self.config.depth}


class ParallelObjective(DeepObjective):
    """Of heads that guess several places at once, whose outputs start as the target's own."""

    def shape(self, session: Session) -> dict[str, Any]:
        config = self.config
        few = 0 < config.vocabulary < innermost(session.target).vocab_size
        tokens = config.vocabulary if few else 0
        return {**super().shape(session), "blocks": config.blocks, "tokens": tokens}

    def begin(self, head: Any, session: Session) -> None:
        super().begin(head, session)
        scale = 1.0 if self.ends.head is None else self.ends.head.scale
        head.start_from(self.ends.weight * scale)
        if self.scored is not None:
            head.scored.copy_(self.scored)
            self.scored = None  # it keeps them itself


class BranchObjective(DeepObjective):
    """Of heads that draft along texts while they learn, with one of the target's layers."""

    def shape(self, session: Session) -> dict[str, Any]:
        return {**super().shape(session), **layer_shape(session)}

    def learnt(
        self, head: Any, texts: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        found: tuple[Tensor, dict[str, Tensor]] = head.learn(
            texts, self.ends, self.config.state_weight
        )
        return found


class FeatureObjective(GuessObjective):
    """Of heads that guess state after state, in the shape of one of the target's layers."""

    def shape(self, session: Session) -> dict[str, Any]:
        return layer_shape(session)

    def __call__(
        self, model: Any, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if torch.is_grad_enabled() and self.config.noise:
            disturbed = batch["hidden"] + self.config.noise * (
                2 * torch.rand_like(batch["hidden"]) - 1
            )
            batch = {**batch, "read": disturbed}
        return super().__call__(model, batch, rng)


class EagleObjective(FeatureObjective):
    """Of EAGLE's head, in the form that is published and that other engines load."""

    def shape(self, session: Session) -> dict[str, Any]:
        return {**super().shape(session), "join_bias": False, "begins": 1}


def layer_shape(session: Session) -> dict[str, int]:
    """Attention heads and width of the MLP of one of the target's layers; none of a table's."""
    lm = innermost(session.target)
    if not isinstance(lm, CachedLM):
        return {}
    config = lm.model.config.get_text_config(decoder=True)
    inner = getattr(config, "intermediate_size", None) or 4 * lm.hidden_size
    return {"heads": config.num_attention_heads, "inner": inner}
