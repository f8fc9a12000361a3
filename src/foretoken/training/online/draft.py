"""A session's draft learns from what the session writes (OSD, arXiv 2310.07177).

It listens to the engine's steps. Where guesses were rejected it keeps the target's law, which the
verification has computed anyway; after some requests it takes a few optimizer steps on them, and
the draft that serves gets the new weights, at once or once they have passed a trial. All of it
happens between two steps of decoding, in the thread that decodes, a slice at a time. Whatever the
draft has become, the text keeps the target's law; a greedy text stays the same, a seeded one is
drawn anew once the draft has other weights. While nobody writes, `rest` learns a slice at a time
whatever it takes: a server is seldom busy.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.engine.scheduling import Scheduler, held
from foretoken.engine.session import Session
from foretoken.errors import CapabilityError, ConfigError, ForetokenError
from foretoken.lm.views.few_rows import FewRows
from foretoken.training import checkpoint
from foretoken.training.identity import identity
from foretoken.training.online.evidence import Evidence, Heard
from foretoken.training.online.giving_way import never
from foretoken.training.online.learner import Learner
from foretoken.training.online.served import RoutedDrafts, opened_twin, twin, whole_model
from foretoken.training.online.settings import OnlineSettings
from foretoken.training.online.topics import Centroids, Router
from foretoken.types import DecodeState, Step

LOG = logging.getLogger(__name__)
RECENT = 50  # requests that the acceptance is told of
# What arithmetic, memory and a caller's router can raise; of learning, never of the text.
FAILURES = (
    RuntimeError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError,
    AssertionError, MemoryError, OSError, ForetokenError,
)  # fmt: skip


@dataclass(slots=True)
class Allowance:
    """Seconds that learning may take: a share of those spent decoding. A share of 1 is no limit."""

    share: float
    left: float = 0.0
    earned: float = 0.0  # in all
    spent: float = 0.0  # in all
    listening: float = 0.0  # of these, for listening
    last: dict[str, float] = field(default_factory=dict)  # seconds of the last slice of a name

    def earn(self, seconds: float) -> None:
        """Decoding took so long."""
        self.left += self.share * seconds
        self.earned += self.share * seconds

    def allows(self, name: str) -> bool:
        return self.share >= 1 or self.left >= self.last.get(name, 0.0)

    @property
    def may_listen(self) -> bool:
        """Whether half of the time is left for learning; else only some steps are listened to."""
        return self.share >= 1 or self.listening <= 0.5 * self.earned

    def charge(self, seconds: float) -> None:
        self.left -= seconds
        self.spent += seconds


class OnlineDraft:
    """Lets the draft of a session learn, from its creation until `close`.

    The session guesses with copies of its draft: a model that a caller passed to `load` keeps its
    weights, and `give` puts the learned ones into it. With several topics there is a copy for each;
    `router` tells the topic of a prompt's ids, without one they are told apart by their tokens.
    """

    def __init__(
        self,
        session: Session,
        settings: OnlineSettings | None = None,
        router: Router | None = None,
    ) -> None:
        self.session, self.settings = session, settings or OnlineSettings()
        self.engine = session.engine
        before = session.draft
        self.guessers = guessing_models(self.engine.drafter, before)
        model, topics = whole_model(before), range(self.settings.topics)
        self.begun_as = identity(model, told=self.settings.tables)
        vocab = self.engine.target.vocab_size
        self.tokens = before.output_rows.tokens if isinstance(before, FewRows) else None
        self.topic_of = router or (Centroids(len(topics)) if len(topics) > 1 else first_topic)
        with torch.inference_mode(False):
            self.learners = [
                Learner(twin(model, torch.float32), self.tokens, self.settings, vocab)
                for _ in topics
            ]
            drafts = [opened_twin(before) for _ in topics]
        self.served = RoutedDrafts(drafts, self.topic_of, before)
        some = self.settings
        self.evidence = Evidence(some.laws, some.window, some.accepted, some.seed)
        self.allowance = Allowance(some.share)
        self.work: tuple[int, Iterator[str], str] | None = None  # topic, slices, the next one
        self.spare = False  # whether that work was begun in a moment without any other
        self.recent: deque[tuple[int, int]] = deque(maxlen=RECENT)
        self.requests, self.seconds = 0, 0.0  # heard; spent learning
        self.frozen = False
        self.failure: Exception | None = None  # what ended learning, where something did
        self.serve_with(self.served)
        self.engine.listeners.append(self.hear)
        LOG.info("%s", self)

    def __str__(self) -> str:
        mine = sum(learner.nbytes for learner in self.learners)
        served = sum(
            weight.nbytes for lm in self.served.drafts for weight in whole_model(lm).parameters()
        )
        room = self.settings.topics * self.settings.buffer_mib
        return (
            f"{len(self.learners)} learn, {served / 2**20:.1f} MiB that serve, "
            f"{mine / 2**20:.1f} MiB in training, buffers of {room:g} MiB at most"
        )

    def serve_with(self, draft: Any) -> None:
        """Let the session guess with another opened draft."""
        with held(self.session.scheduler.turns):
            if not self.engine.idle:
                raise ConfigError(
                    "learning was to begin or end while the session writes.",
                    "the draft of a row is chosen when its prompt is read.",
                    "wait for the texts under way.",
                )
            for guesser in self.guessers:
                guesser.lm = draft
            self.session.draft = draft
            self.session.scheduler = Scheduler(self.engine, *self.session.models)

    @property
    def acceptance(self) -> float:
        """Accepted share of the judged guesses of the last requests."""
        recent = tuple(self.recent)  # others ask, too, while it grows
        return sum(a for a, _ in recent) / max(sum(j for _, j in recent), 1)

    @property
    def steps(self) -> int:
        """Optimizer steps of all topics."""
        return sum(learner.steps for learner in self.learners)

    @property
    def served_steps(self) -> int:
        """Those behind the weights that guess."""
        return sum(learner.served_steps for learner in self.learners)

    @property
    def nbytes(self) -> int:
        """Of the buffers."""
        return sum(learner.buffer.nbytes for learner in self.learners)

    def hear(self, step: Step) -> None:
        """A listener of the engine: learns of a step. An error ends learning, not the text."""
        if self.frozen or step.rows[0].rehearsal:
            return
        began = perf_counter()
        allowance = self.allowance
        allowance.earn(step.times.whole + step.times.prefill)
        self.guarded(lambda: self.note(self.evidence.read(step, allowance.may_listen)))
        listened = perf_counter() - began
        allowance.charge(listened)
        allowance.listening += listened
        if not self.frozen:
            self.guarded(self.advance)

    def note(self, heard: list[Heard]) -> None:
        """Put what was heard into the buffers of its topics."""
        for one in heard:
            self.learners[self.served.topic(one.row)].hear(one.lessons)
            self.requests += 1
            self.recent.append((one.accepted, one.judged))

    def advance(self) -> None:
        """One slice of what is due, if its time is allowed; without a limit, all of it.

        What was begun in a moment without work waits for the next one, unless something is due.
        """
        while True:
            due = [topic for topic, learner in enumerate(self.learners) if learner.due]
            if not due and (self.work is None or self.spare):
                return
            if self.work is None:
                self.work, self.spare = self.begun(due[0], self.settings.updates), False
            if not self.allowance.allows(self.work[2]):
                return
            self.allowance.charge(self.slice())
            if self.settings.share < 1:
                return

    def rest(self, disturbed: Callable[[], bool] = never) -> bool:
        """Learn a slice in a moment in which nobody writes; False where nothing is left to learn.

        What was heard is learned `passes` times so. Others wait for their next step of decoding;
        once `disturbed()`, which is asked between any two layers, the slice is given up, to be
        learned another time.
        """
        if self.frozen:
            return False
        with held(self.session.scheduler.turns):
            self.guarded(self.take_up)
            if self.work is None:
                return False
            way = self.learners[self.work[0]].way
            way.disturbed = disturbed
            try:
                self.guarded(self.slice)
            finally:
                way.disturbed = never
        return True

    def take_up(self) -> None:
        """Begin an optimizer step of a topic that has something left to learn."""
        hungry = [i for i, learner in enumerate(self.learners) if learner.hungry]
        if self.work is None and hungry:
            self.work, self.spare = self.begun(hungry[0], 1), True

    def begun(self, topic: int, count: int) -> tuple[int, Iterator[str], str]:
        """Some optimizer steps of a topic, before their first slice."""
        slices = self.slices(topic, count)
        return topic, slices, next(slices)

    def slices(self, topic: int, count: int) -> Iterator[str]:
        """Optimizer steps, and weights into the draft that serves once they may."""
        learner = self.learners[topic]

        def serve() -> None:
            self.swap(topic, learner.model)
            learner.promote()

        yield from learner.updates(count, serve)

    def swap(self, topic: int, model: Any) -> None:
        """Guess with the weights of a model. Rows go on with a cache of them, but for those of a
        draft that runs ahead, whose trees are open: a stale cache only guesses worse.
        """
        plain = all(type(guesser) is OrdinaryModel for guesser in self.guessers)
        rows: list[DecodeState] = [row for row in self.engine.running if row.finish is None]
        self.served.take(topic, model.parameters(), rows if plain else ())

    def slice(self) -> float:
        """The next slice of the work at hand; its seconds."""
        assert self.work is not None
        topic, slices, name = self.work
        began, given_up = perf_counter(), self.learners[topic].way.given_up
        with torch.inference_mode(False), torch.enable_grad():
            following = next(slices, None)
        seconds = perf_counter() - began
        self.seconds += seconds
        if self.learners[topic].way.given_up == given_up:
            self.allowance.last[name] = seconds
        self.work = None if following is None else (topic, slices, following)
        return seconds

    def guarded(self, job: Any) -> None:
        """Run a part of learning; what it raises freezes the draft as it serves, and is told."""
        try:
            job()
        except FAILURES as error:
            self.failure, self.work = error, None
            self.freeze()
            LOG.warning("online: learning has ended, the draft serves as it is: %s", error)

    def freeze(self) -> None:
        """Learn no more; the weights stay as they are."""
        self.frozen = True

    def thaw(self) -> None:
        """Learn again, after `freeze` or a failure."""
        self.frozen, self.failure = False, None

    def learn(self, updates: int | None = None) -> int:
        """Learn now, from however little, whatever time it takes; the optimizer steps taken.

        What is under way is ended first. Others wait for their next step of decoding.
        """
        before = self.steps
        with held(self.session.scheduler.turns):
            while self.work is not None:
                self.slice()
            for topic, learner in enumerate(self.learners):
                if len(learner.buffer):
                    self.work = self.begun(topic, updates or self.settings.updates)
                    while self.work is not None:
                        self.slice()
        return self.steps - before

    def give(self, model: Any, topic: int = 0) -> None:
        """Put the learned weights that serve into a loaded model of the same shape."""
        with held(self.session.scheduler.turns), torch.inference_mode(False), torch.no_grad():
            model.load_state_dict(self.learners[topic].serving.state_dict())

    def save(self, folder: Path) -> Path:
        """Write all that is needed to go on, whole or not at all."""
        with held(self.session.scheduler.turns):
            state = {
                "learners": [learner.state() for learner in self.learners],
                "requests": self.requests,
                "recent": list(self.recent),
                "topics": self.topic_of.state() if isinstance(self.topic_of, Centroids) else None,
                "begun_as": self.begun_as,
            }
            return checkpoint.save(folder, self.requests, state, best=False)

    def load(self, folder: Path) -> bool:
        """Go on from what `save` wrote last in a folder; False where nothing was."""
        path = checkpoint.latest(folder)
        if path is None:
            return False
        state = checkpoint.load(path)
        if "learners" not in state or state.get("begun_as", self.begun_as) != self.begun_as:
            raise ConfigError(
                f"going on from {path} was asked for.",
                "another draft learned there, or other parts of it did (`tables`).",
                "load the draft that it began as, with its --dtype, or pass another folder.",
            )
        if len(state["learners"]) != len(self.learners):
            raise ConfigError(
                f"going on from {path} with {len(self.learners)} topics was asked for.",
                f"{len(state['learners'])} drafts were learning there.",
                "pass as many topics, or another folder.",
            )
        with held(self.session.scheduler.turns), torch.inference_mode(False):
            self.work = None
            for topic, (learner, own) in enumerate(
                zip(self.learners, state["learners"], strict=True)
            ):
                learner.restore(own)
                self.swap(topic, learner.serving)
            if isinstance(self.topic_of, Centroids) and state["topics"] is not None:
                self.topic_of.restore(state["topics"])
            self.requests = state["requests"]
            self.recent.extend(tuple(pair) for pair in state["recent"])
        return True

    def close(self) -> None:
        """Learn no more, and give the session its own draft back."""
        if self.hear in self.engine.listeners:
            self.serve_with(self.served.before)
            self.engine.listeners.remove(self.hear)
            for draft in self.served.drafts:
                draft.close()

    def __enter__(self) -> OnlineDraft:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def first_topic(prompt: Any) -> int:
    return 0


def guessing_models(drafter: Any, draft: Any) -> list[OrdinaryModel]:
    """Whatever guesses with this draft model in a drafter and its members, token by token.

    CapabilityError where nothing does.
    """
    found: dict[int, OrdinaryModel] = {}
    left = [drafter]
    while left:
        one = left.pop()
        left += getattr(one, "members", ())
        model = getattr(one, "model", None)
        if isinstance(model, OrdinaryModel) and model.lm is draft:
            found[id(model)] = model
    if found:
        return list(found.values())
    raise CapabilityError(
        f"learning while it serves was asked of {type(drafter).__name__}.",
        "a draft model that guesses token by token learns: methods auto-draft, hybrid, chain, tree "
        "and their kin.",
        "load the session with a draft, and with method chain, say.",
    )
