"""One running server: its session, who is inside, and whether it takes more."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from foretoken.engine.lengths import check_ahead
from foretoken.engine.scheduling import held
from foretoken.engine.session import Session
from foretoken.engine.timings import timed_before
from foretoken.errors import CapabilityError, ConfigError, ForetokenError, WrongLogits
from foretoken.lm.kernels.teams import dismiss
from foretoken.lm.runtime.prefixes import Prefixes
from foretoken.serve.answer import Account, Answer
from foretoken.serve.engine_thread import EngineThread
from foretoken.serve.estimate import PlainSteps
from foretoken.serve.logprobs import Names
from foretoken.serve.metrics import Counts, Metrics
from foretoken.serve.settings import Settings
from foretoken.serve.wire.errors import Refusal, internal, refusal_of, stopping
from foretoken.serve.wire.requests import Asked
from foretoken.serve.writing import Piece, Wants

if TYPE_CHECKING:
    from foretoken.training.online.serving import IdleLearning

LOG = logging.getLogger(__name__)
PREPARERS = 2  # threads that tokenize prompts and check options
MEMORY = 0.1  # of the mean time in the server, the weight of the request seen last


class Service:
    """What all requests of a server share."""

    def __init__(
        self, session: Session, settings: Settings, learning: IdleLearning | None = None
    ) -> None:
        check_session(session)
        self.session, self.settings = session, settings
        session.prepare(batches=True)
        with held(session.scheduler.turns):
            check_ahead(session.engine)
        dismiss()  # steps are made by another thread
        self.counts = Counts(PlainSteps(timed_before(session.target)))
        self.metrics = Metrics(session, self.counts, learning)
        self.thread = EngineThread(
            session, self.counts, None if learning is None else learning.rest
        )
        self.names = Names(session.tokenizer)
        self.answers: set[Answer] = set()
        self.places = 0  # texts let in
        self.mean_age = 1.0  # seconds that a request was in the server
        self.stopping = False
        self.started = False
        self.created = int(time.time())
        self.run = secrets.token_hex(4)
        self.served = 0
        self.empty = asyncio.Event()
        promise = session.engine.promise
        self.lossy: str | None = None if promise.lossless else promise.why
        self.learning = learning
        self.kept: list[tuple[Any, int]] = []  # models, and bytes they kept of texts before

    @property
    def fingerprint(self) -> str:
        """What a seeded text follows from beside its request; of a draft that learns, its steps."""
        steps = "" if self.learning is None else f"+{self.learning.online.served_steps}"
        return f"{self.session.method}{steps}-{'lossy' if self.lossy else 'lossless'}"

    async def start(self) -> None:
        """Begin to run steps."""
        if self.settings.prefix_cache:
            self.kept = [(lm, kept_by(lm)) for lm in self.session.models]
            self.session.keep_prefixes(self.settings.prefix_cache)
        self.preparers = ThreadPoolExecutor(PREPARERS, thread_name_prefix="foretoken-prepare")
        self.stopping = False
        self.thread.start(self.deliver)
        self.started = True

    async def stop(self) -> None:
        """End all texts that are left, and leave the session as it was: of texts that are over it
        keeps up to as many bytes as before, those it kept before aside.
        """
        self.end_all()
        self.started = False
        await self.thread.stop()
        self.preparers.shutdown(wait=False, cancel_futures=True)
        with held(self.session.scheduler.turns):
            for lm, limit in self.kept:
                lm.keep_prefixes(limit)
        self.kept = []

    def deliver(self, pieces: list[Piece]) -> None:
        """Hand what a step added to who waits for it."""
        for piece in pieces:
            piece.writing.put(piece)

    @property
    def healthy(self) -> bool:
        return self.started and not self.stopping and self.thread.alive

    def next_id(self) -> str:
        """The id of a request: unlike any other of this server, and of others."""
        self.served += 1
        return f"{self.run}{self.served:08x}"

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served here."""
        if name not in (None, self.settings.model_name):
            raise Refusal(
                f"the model {name[:200]!r} was asked for.",
                f"this server has one model: {self.settings.model_name}.",
                "ask for that one; GET /v1/models lists it.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def admit(self, asked: Asked, prompts: Sequence[Any], wants: Wants, account: Account) -> Answer:
        """Let a request in, or say why not."""
        if not self.healthy:
            raise stopping()
        answer = Answer(self.session, self.thread, self.blame, asked, prompts, wants, account)
        room = self.session.max_rows + self.settings.queue
        if answer.count > room:
            raise Refusal(
                f"{answer.count} texts were asked for at once.",
                f"this server has {self.session.max_rows} places and lets "
                f"{self.settings.queue} more wait.",
                f"ask for {room} or fewer, in several requests.",
                code="too_many_texts",
            )
        # Of the owner's own texts: one API key that fills its queue keeps no other out.
        mine = sum(one.count for one in self.answers if one.account.owner == account.owner)
        if mine + answer.count > room:
            raise self.full(mine)
        self.places += answer.count
        self.answers.add(answer)
        self.empty.clear()
        return answer

    def full(self, mine: int) -> Refusal:
        """429, with the seconds until a place should be free."""
        rounds = max(self.settings.queue, 1) / self.session.max_rows
        return Refusal(
            f"{mine} texts are being written or wait.",
            f"this server has {self.session.max_rows} places and lets {self.settings.queue} wait.",
            "ask again later; Retry-After says when.",
            status=429,
            kind="rate_limit_error",
            code="queue_full",
            retry_after=min(max(math.ceil(rounds * self.mean_age), 1), 60),
        )

    def leave(self, answer: Answer) -> None:
        """A request is over."""
        if answer not in self.answers:
            return
        self.answers.discard(answer)
        self.places -= answer.count
        if not self.answers:
            self.empty.set()  # before any figures: the server's end waits for it
        answer.close()
        self.mean_age += MEMORY * (answer.age - self.mean_age)
        self.counts.prompt_tokens += answer.read_tokens
        self.counts.cached_tokens += answer.cached_tokens

    def end_all(self) -> None:
        """Take nothing more, and end what runs with an error that says so."""
        self.stopping = True
        for answer in tuple(self.answers):
            answer.end(stopping())

    async def finish(self, seconds: float) -> None:
        """Take nothing more; let what runs go on for so long, then end it."""
        self.stopping = True
        if self.answers:
            try:
                await asyncio.wait_for(self.empty.wait(), seconds)
            except TimeoutError:
                LOG.warning("%d requests did not end in %g s", len(self.answers), seconds)
        self.end_all()

    def blame(self, error: BaseException) -> Refusal:
        """What a client is told of an exception; a fault of ours is logged under an id."""
        if isinstance(error, ForetokenError) and not self.own_fault(error):
            return refusal_of(error)
        number = self.next_id()
        self.counts.engine_errors += 1
        LOG.error("error %s: %r", number, error, exc_info=error)
        return internal(number)

    def own_fault(self, error: ForetokenError) -> bool:
        """Whether no request is to blame: logits of a cache are wrong, a package is missing, or a
        model was closed or set to training mode."""
        if isinstance(error, WrongLogits) or isinstance(error.__cause__, ModuleNotFoundError):
            return True
        try:
            for lm in self.session.models:
                lm.check_usable()
        except ForetokenError as unusable:
            return str(error) == str(unusable)
        return False


def check_session(session: Session) -> None:
    """Refuse a session that cannot answer in texts."""
    if session.writes != "text":
        raise CapabilityError(
            f"a server with method {session.method!r} was asked for.",
            "this method writes several scored texts per prompt; a server's answers are single.",
            "use a method that writes one text, such as chain.",
        )
    if session.tokenizer is None:
        raise ConfigError(
            "a server over a session without a tokenizer was asked for.",
            "requests and answers are texts.",
            "pass tokenizer= to load.",
        )


def kept_by(lm: Any) -> int:
    """Bytes of texts that are over that a model was asked to keep; 0: none."""
    prefixes: Prefixes | None = lm.prefixes
    return 0 if prefixes is None else prefixes.asked
