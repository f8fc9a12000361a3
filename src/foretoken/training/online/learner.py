"""A draft in training beside the one that serves: float32 weights, an optimizer, a buffer."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.training.dataset.records import Laws
from foretoken.training.objectives.sparse_laws import SparseLaws
from foretoken.training.online.evidence import Buffer, Lesson, collated
from foretoken.training.online.giving_way import GivingWay
from foretoken.training.online.settings import OnlineSettings
from foretoken.training.online.trial import Trial
from foretoken.training.plain_logits import check_linear

MOST_NORM = 1.0  # of the gradients


class Learner:
    """Takes steps of AdamW on the forward divergence from the target's laws in its buffer.

    `serving` are the weights to guess with: `model` itself, or with `settings.trial` a copy, which
    follows when the weights that were tried have passed.
    """

    def __init__(
        self,
        model: Any,
        tokens: Tensor | None,
        settings: OnlineSettings,
        vocab_size: int | None = None,
    ) -> None:
        """`tokens`: those that it scores; None: all. `vocab_size`: of the target's laws, which may
        be wider than the draft's."""
        check_linear(model, "learning while it serves")
        width = model.config.vocab_size
        scored = torch.arange(width) if tokens is None else tokens.cpu()
        self.model, self.settings = model.requires_grad_(True), settings
        if not settings.tables:
            for table in (model.get_input_embeddings(), model.get_output_embeddings()):
                table.requires_grad_(False)
        moving = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.names, self.learned = frozenset(moving), list(moving.values())
        self.device = next(model.parameters()).device
        self.objective = SparseLaws.over(scored, max(width, vocab_size or 0))
        self.optimizer = torch.optim.AdamW(
            self.learned, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.buffer = Buffer(settings.buffer, int(settings.buffer_mib * 2**20))
        self.serving, self.trial = model, None
        if settings.trial:
            kept = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
            self.serving = copy.deepcopy(model, kept).requires_grad_(False)
            self.trial = Trial(self.objective, settings.trial)
        self.way = GivingWay(*{self.model, self.serving})
        self.heard = 0  # lessons, in all
        self.requests = 0  # since the last update was due
        self.left = 0.0  # lessons still to be learned in moments without work, repeats included
        self.steps = 0
        self.served_steps = 0  # those behind the weights that serve
        self.loss = float("nan")  # of the last step, before it

    @property
    def due(self) -> bool:
        """Whether enough requests have ended since the last time."""
        return self.requests >= self.settings.interval and self.may_begin

    @property
    def hungry(self) -> bool:
        """Whether something is left to be learned in a moment without work."""
        return self.left >= 1 and self.may_begin

    @property
    def may_begin(self) -> bool:
        return len(self.buffer) > 0 and self.heard >= self.settings.begin

    def hear(self, lessons: Sequence[Lesson]) -> None:
        """A request has ended; what is to be learned of it."""
        for lesson in lessons:
            self.buffer.add(lesson)
        self.heard += len(lessons)
        self.requests += 1
        if self.may_begin:  # what came before is drawn beside it: no long work on it alone
            passes = self.settings.passes
            self.left = min(self.left + passes * len(lessons), passes * len(self.buffer))

    def updates(self, count: int, serve: Callable[[], None]) -> Iterator[str]:
        """`count` steps in slices; yields the name of the slice that comes next.

        `serve` is called when the weights, as they are then, are to guess: behind the steps, or
        where a trial is asked for, before a step and once it is passed.
        """
        self.requests = 0
        for _ in range(count):
            rng = random.Random(f"{self.settings.seed}/{self.steps}")
            older, new = self.buffer.draw(self.settings.texts, rng)
            if self.trial is not None and self.steps > self.served_steps:
                for lesson in new:
                    trial = partial(self.trial.hear, self.model, self.serving, lesson)
                    yield from self.way.tried("trial", trial)
                if self.trial.passed:
                    yield "swap"
                    serve()
            lessons = older + new
            places = sum(len(lesson.places) for lesson in lessons)
            self.left = max(self.left - len(lessons), 0.0)
            loss = 0.0
            self.optimizer.zero_grad()
            for part in slices(lessons, self.settings.slice_tokens):
                taken = partial(self.gradients, part, places)
                loss += yield from self.way.tried("gradients", taken)
            yield "step"
            self.step(loss)
        if self.trial is None:
            yield "swap"
            serve()

    def gradients(self, lessons: Sequence[Lesson], places: int) -> float:
        """Add the gradients of some lessons, each of `places` places counting the same: all of
        them, or where it is disturbed, none."""
        batch = {name: part.to(self.device) for name, part in collated(lessons).items()}
        loss, _ = self.objective(self.model, batch, random.Random(0))
        part = loss * (sum(len(lesson.places) for lesson in lessons) / places)
        found = torch.autograd.grad(part, self.learned, allow_unused=True)
        for weight, slope in zip(self.learned, found, strict=True):
            if slope is not None:
                weight.grad = slope if weight.grad is None else weight.grad.add_(slope)
        return float(part.detach())

    def step(self, loss: float) -> None:
        """Move the weights, unless a gradient is no number: then they stay as they are."""
        norm = torch.nn.utils.clip_grad_norm_(self.learned, MOST_NORM)
        if not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad()
            raise ConfigError(
                f"step {self.steps + 1} of a draft that learns while it serves was asked for.",
                f"its gradients are no numbers (norm {float(norm)}, loss {loss}).",
                f"pass a rate below {self.settings.rate:g}.",
            )
        some = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = some.rate * min((self.steps + 1) / max(some.warmup, 1), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.loss = loss

    @torch.no_grad()
    def promote(self) -> None:
        """The weights as they are now are those that guess from here on."""
        self.served_steps = self.steps
        if self.trial is not None:
            for mine, theirs in zip(
                self.serving.parameters(), self.model.parameters(), strict=True
            ):
                mine.copy_(theirs)
            self.trial.restart()

    @property
    def nbytes(self) -> int:
        """Of the weights, and of those that learn their gradients, the two moments of AdamW, and
        the copy that serves while they are on trial."""
        weights = sum(weight.nbytes for weight in self.model.parameters())
        copies = 3 if self.trial is None else 4
        return int(weights + copies * sum(weight.nbytes for weight in self.learned))

    def moving(self, model: Any) -> dict[str, Tensor]:
        """The weights of `model` that learning moves: the others are those that it began with."""
        of = model.named_parameters()
        return {name: weight.detach() for name, weight in of if name in self.names}

    def state(self) -> dict[str, Any]:
        """All that is needed to go on from the draft that it began as."""
        lessons = [
            (one.tokens, one.places, one.laws.tokens, one.laws.log_probs, one.counts, one.greedy)
            for one in self.buffer.lessons
        ]
        on_trial = None if self.trial is None else self.moving(self.serving)
        return {
            "model": self.moving(self.model), "optimizer": self.optimizer.state_dict(),
            "steps": self.steps, "requests": self.requests, "fresh": self.buffer.fresh,
            "left": self.left, "heard": self.heard, "lessons": lessons,
            "served": self.served_steps, "serving": on_trial,
            "gains": [] if self.trial is None else list(self.trial.gains),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.requests = state["steps"], state["requests"]
        self.buffer = Buffer(self.buffer.most, self.buffer.room)
        old = "heard" not in state  # of before there were trials: nothing of it can be tried
        for tokens, places, some, log_probs, *others in state["lessons"]:
            told = (torch.ones(len(places)), False) if old else others
            self.buffer.add(Lesson(tokens, places, Laws(some, log_probs), *told))
        self.buffer.fresh = 0 if old else min(state["fresh"], len(self.buffer))
        self.heard = state.get("heard", len(self.buffer))
        left = state.get("left", 0.0)  # states of before learned nothing in idle moments
        self.left = min(left, self.settings.passes * len(self.buffer))
        self.promote()
        if self.trial is not None and state.get("serving") is not None:
            self.serving.load_state_dict(state["serving"], strict=False)
            self.served_steps = state["served"]
            self.trial.restart(state["gains"])


def slices(lessons: Sequence[Lesson], tokens: int) -> Iterator[list[Lesson]]:
    """Lessons in groups of at most so many tokens, padding included, or of one lesson."""
    group: list[Lesson] = []
    for lesson in sorted(lessons, key=lambda one: len(one.tokens)):
        if group and (len(group) + 1) * len(lesson.tokens) > tokens:
            yield group
            group = []
        group.append(lesson)
    if group:
        yield group
