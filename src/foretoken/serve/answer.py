"""All texts of one request, from the moment it is let in until nobody waits for them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from foretoken.engine.session import Session
from foretoken.serve.asking import rows_of
from foretoken.serve.engine_thread import EngineThread
from foretoken.serve.estimate import PlainSteps
from foretoken.serve.wire.errors import Refusal, too_large
from foretoken.serve.wire.requests import Asked, CompletionRequest
from foretoken.serve.writing import Piece, Wants, Writing

LEFT = "client_left"  # the error of a request whose client did not wait for its end


@dataclass(slots=True)
class Account:
    """What is known of a request once it is over: a line of the log."""

    id: str
    began: float  # on the monotonic clock
    path: str = ""
    status: int = 0
    owner: str = ""  # which key was sent; empty where there are none
    user: str = ""  # as the request names it
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def requester(self) -> str:
        """Key and user in one."""
        return "/".join(filter(None, (self.owner, self.user)))


class Answer:
    """The texts of a request. Everything but `begin` and `post` is called in the event loop."""

    def __init__(
        self,
        session: Session,
        thread: EngineThread,
        blame: Callable[[BaseException], Refusal],
        asked: Asked,
        prompts: Sequence[Any],
        wants: Wants,
        account: Account,
    ) -> None:
        self.session, self.thread, self.blame = session, thread, blame
        self.asked, self.prompts, self.wants, self.account = asked, prompts, wants, account
        self.count = len(prompts) * asked.texts
        self.writings: list[Writing] = []
        self.left = self.count  # texts that are not over
        self.refusal: Refusal | None = None  # why it ends before its time
        self.gone = False  # the client left
        self._box: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None

    def begin(self, plain: PlainSteps, limit: int | None) -> None:
        """Make rows of the prompts and have them written; waits for tokenizer and model.

        Nothing is written where all is over by then.
        """
        if self.done:
            return
        who = {"owner": self.account.owner, "requester": self.account.user}
        rows = rows_of(self.session, self.asked, self.prompts, who, limit, lambda: self.done)
        if self.done:
            return
        for row in rows:
            if (why := self.session.engine.waiting.refusal(row)) is not None:
                raise too_large(why)
        self.writings = [
            Writing(self.session, row, i, self.wants, plain, self.post, self.put)
            for i, row in enumerate(rows)
        ]
        self.thread.submit(self.writings)
        if self.gone or self.refusal is not None:  # since then, and perhaps before there were any
            self.thread.cancel(rows)

    def post(self, piece: Piece) -> None:
        """Called by the engine's thread: goes out with all others of its step."""
        self.thread.outbox.append(piece)

    def put(self, piece: Piece) -> None:
        """A piece has come in."""
        self._box.append(piece)
        if piece.over:
            self.left -= 1
            error = piece.writing.row.error
            if error is not None and self.refusal is None:
                self.end(self.blame(error))
        self._wake()

    def end(self, refusal: Refusal) -> None:
        """End all texts now, for this reason."""
        if self.refusal is None:
            self.refusal = refusal
        self._cancel()

    def leave(self) -> None:
        """Nobody reads it any more."""
        self.gone = True
        if self.left and self.refusal is None:
            self.account.facts["error"] = LEFT
        self._cancel()

    def _cancel(self) -> None:
        self.thread.cancel([writing.row for writing in self.writings])
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def done(self) -> bool:
        """Whether nothing more is to be waited for."""
        return self.gone or self.refusal is not None or self.left == 0

    async def until(self, job: asyncio.Future[Any]) -> None:
        """Return once `job` is done, or all is over before it is."""
        while not (job.done() or self.done):
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait((job, self._waiter), return_when=asyncio.FIRST_COMPLETED)

    async def take(self, limit: float | None = None) -> list[Piece]:
        """What has come in since the last call; waits for something, unless all is over, and for so
        many seconds at most."""
        if not self._box and not self.done:
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._waiter,), timeout=limit)
        pieces, self._box = self._box, []
        return pieces

    async def whole(self) -> list[Writing]:
        """All texts, each to its end."""
        while not self.done:
            await self.take()
        if self.refusal is not None:
            raise self.refusal
        return self.writings

    def close(self) -> None:
        """Free what is left, and remember what became of it."""
        if self.left:
            self.gone = True  # rows that are being made just now end, too
            self._cancel()
        self.account.facts |= self.facts()

    def facts(self) -> dict[str, Any]:
        """Figures for the log and the metrics."""
        stats = [writing.stats for writing in self.writings]
        drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
        steps, tokens = sum(s.target_steps for s in stats), sum(s.tokens for s in stats)
        firsts = [w.first for w in self.writings if w.first is not None]
        return {
            "stream": self.wants.pieces,
            "texts": self.count,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "tokens": tokens,
            "finish_reasons": [w.row.finish.reason for w in self.writings if w.row.finish],
            "ttft": rounded(min(firsts) - self.account.began) if firsts else None,
            "tpot": rounded(self.time_per_token),
            "drafted": drafted,
            "accepted": accepted,
            "acceptance": rounded(accepted / drafted) if drafted else None,
            "tokens_per_step": rounded(tokens / steps) if steps else None,
        }

    @property
    def entries(self) -> int:
        """Tokens that are told of, with the likeliest ones in place of each; those of prompts where
        they are repeated."""
        tokens = sum(len(one.row.tokens) for one in self.writings)
        if not (isinstance(self.asked, CompletionRequest) and self.asked.echo):
            tokens -= sum(one.row.prompt_len for one in self.writings)
        return tokens * (1 + (self.wants.logprobs or 0))

    @property
    def firsts(self) -> list[Writing]:
        """The first text of each prompt."""
        return self.writings[:: self.asked.texts]

    @property
    def prompt_tokens(self) -> int:
        return sum(writing.row.prompt_len for writing in self.firsts)

    @property
    def read_tokens(self) -> int:
        """Of these, those of prompts that the model began to read before all was over."""
        rows = [writing.row for writing in self.firsts]
        return sum(row.prompt_len for row in rows if row.prefill > 0 or row.reused)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that an earlier text had left in the cache."""
        return sum(writing.row.reused.get("target", 0) for writing in self.firsts)

    @property
    def time_per_token(self) -> float | None:
        """Mean seconds per token behind the first step, over all texts."""
        spans = [
            (w.last - w.first, w.stats.tokens - w.begun)
            for w in self.writings
            if w.first is not None and w.last is not None and w.stats.tokens > w.begun
        ]
        return sum(s for s, _ in spans) / sum(n for _, n in spans) if spans else None

    @property
    def age(self) -> float:
        """Seconds since it was let in."""
        return perf_counter() - self.account.began


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
