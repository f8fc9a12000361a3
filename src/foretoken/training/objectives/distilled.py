"""DistillSpec: a draft learns the target's laws on texts of the target, of its own, or of both.

On its own texts it meets the places that it will meet when it drafts (arXiv 2310.08461). A text
counts as one, however long; sampling has no gradient.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from foretoken.coins import SeededCoins
from foretoken.contract import LanguageModel
from foretoken.row import make_row
from foretoken.training.objectives.divergence import Divergence, PiecedDivergence, restricted
from foretoken.trees.build import chain
from foretoken.types import Draft, Draw, SamplingParams


class OnlyTokens(LogitsProcessor):
    """Sampling from these tokens alone."""

    def __init__(self, tokens: Tensor, vocab_size: int) -> None:
        self.mask = torch.full((vocab_size,), -torch.inf)
        self.mask[tokens] = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.mask.to(scores.device)


@dataclass(frozen=True, slots=True)
class Places:
    """The n places of a batch where somebody answered."""

    ids: Tensor  # [B T]
    told: Tensor  # [B T], where the answers are
    laws: Tensor  # [n V], the target's log-probabilities among the tokens that the draft scores
    lengths: list[int]  # of the answers

    def states(self, model: Any) -> Tensor:
        """The last hidden states [n H] of a model that says the answers."""
        hidden: Tensor = model.base_model(input_ids=self.ids, use_cache=False).last_hidden_state
        return hidden[self.told.roll(-1, 1)]


@dataclass(frozen=True, slots=True)
class Distilled:
    """`of` between the laws of `target` and of the draft, at the answers of a batch.

    With the chance `on_policy` the draft answers the prompts of a batch itself, up to `new_tokens`
    tokens; else the answers are those of the batch. `tokens` are those the draft scores.
    """

    target: LanguageModel
    tokens: Tensor
    of: Divergence
    on_policy: float
    new_tokens: int
    eos: tuple[int, ...]

    def __call__(
        self, model: Any, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        places = self.places(model, batch, rng)
        each = [torch.full((length,), 1.0 / length) for length in places.lengths]
        weights = torch.cat(each).to(places.ids.device) / len(each)
        return divergence(model, places.states(model), self.tokens, places.laws, weights, self.of)

    @property
    def on_texts(self) -> Distilled:
        """The same on the answers of a batch alone, which are no others the next time."""
        return replace(self, on_policy=0.0)

    def count(self, batch: dict[str, Tensor]) -> int:
        """The texts that the loss is a mean over."""
        return len(batch["input_ids"])

    def places(self, model: Any, batch: dict[str, Tensor], rng: random.Random) -> Places:
        """Answers of the batch or of the draft, and the target's laws along them."""
        prompts, answers = parts(batch)
        if rng.random() < self.on_policy:
            answers = self.sampled(model, prompts)
        laws = restricted(target_logits(self.target, prompts, answers), self.tokens)
        device = next(model.parameters()).device
        ids, told = (part.to(device) for part in joined(prompts, answers))
        return Places(ids, told, laws.to(device), [len(answer) for answer in answers])

    @torch.no_grad()
    def sampled(self, model: Any, prompts: list[list[int]]) -> list[list[int]]:
        """What the draft writes after each prompt at temperature 1."""
        longest = max(map(len, prompts))
        pad = self.eos[0] if self.eos else 0
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        only = OnlyTokens(self.tokens, model.config.vocab_size)
        training, device = model.training, next(model.parameters()).device
        model.eval()
        with plain_law(model):
            found = model.generate(
                input_ids=ids.to(device), attention_mask=seen.to(device),
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=self.new_tokens, eos_token_id=list(self.eos) or None,
                pad_token_id=pad, logits_processor=LogitsProcessorList([only]), use_cache=True,
            )[:, longest:].tolist()  # fmt: skip
        model.train(training)
        torch.clear_autocast_cache()  # of weights without gradients, which learning would get
        return [ended(text, self.eos) for text in found]


@contextmanager
def plain_law(model: Any) -> Iterator[None]:
    """`generate` adds whatever the model's generation_config.json asks for, penalties or beams;
    here it does not: the law of the draft is the one it is judged by.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = own


def divergence(
    model: Any, states: Tensor, tokens: Tensor, laws: Tensor, weights: Tensor, of: Divergence
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum over places, and what of the target's laws the draft shares."""
    table = model.get_output_embeddings().weight[tokens]
    pieced: Any = PiecedDivergence.apply
    loss, figures = pieced(states, table, laws, weights, of)
    accepted, agreed = figures / len(states)
    return loss, {"loss": loss.detach(), "overlap": accepted, "agreement": agreed}


def ended(text: list[int], eos: tuple[int, ...]) -> list[int]:
    """A text up to and with its first end token."""
    for at, token in enumerate(text):
        if token in eos:
            return text[: at + 1]
    return text


def parts(batch: dict[str, Tensor]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and answers of a batch with one chat to a row."""
    prompts, answers = [], []
    for ids, weights in zip(batch["input_ids"].tolist(), batch["weights"], strict=True):
        places = weights.nonzero()[:, 0]
        first, last = int(places[0]), int(places[-1])
        prompts.append(ids[:first])
        answers.append(ids[first : last + 1])
    return prompts, answers


def joined(prompts: list[list[int]], answers: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], and where the answers are."""
    rows = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    told = torch.zeros(ids.shape, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        told[i, len(prompt) : len(rows[i])] = True
    return ids, told


@torch.inference_mode()
def target_logits(
    target: LanguageModel, prompts: list[list[int]], answers: list[list[int]]
) -> Tensor:
    """The target's logits [n, V] at every token of the answers, in order."""
    rows = [
        make_row(prompt, SamplingParams(), SeededCoins(0), target.vocab_size) for prompt in prompts
    ]
    drafts = [
        Draft(chain(prompt[-1], answer[:-1]), Draw.POINT)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    target.prefill(rows)
    try:
        scores = target.score(rows, drafts)
        return torch.cat([score.logits.float() for score in scores]).clone()
    finally:
        target.free(rows)
