"""Sessions of methods that write several scored texts per prompt."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from time import perf_counter
from typing import Any, NoReturn, Unpack

from foretoken.engine.beam import BeamRecord, Round, decode
from foretoken.engine.promise import Promise
from foretoken.engine.requests import Prompt, Sampling, as_batch
from foretoken.engine.results import shortened
from foretoken.engine.scheduling import held
from foretoken.engine.session import Session
from foretoken.engine.text import decoder, text_of, words_before
from foretoken.errors import ConfigError
from foretoken.trees.forest import BeamRow
from foretoken.types import DecodeState
from foretoken.verifiers.beams import check_beams


@dataclass(slots=True)
class BeamStats:
    """One prompt's counters; rows of a batch share their forwards, as in `record.Stats`."""

    target_forwards: int = 0  # after the prompt
    grown: int = 0  # tokens that every beam gained
    nodes: int = 0  # positions scored in those forwards, of all rows together
    drafted: int = 0  # attempts, repeats included
    accepted: int = 0
    widths: Counter[int] = field(default_factory=Counter)  # beams drawn for a token -> tokens
    seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a beam gains per target forward; 1.0 is plain beam sampling."""
        return self.grown / self.target_forwards if self.target_forwards else 0.0

    @property
    def mean_width(self) -> float:
        """Beams drawn per token."""
        return sum(w * n for w, n in self.widths.items()) / self.grown if self.grown else 0.0

    def add(self, done: Round, record: BeamRecord) -> None:
        """Count one round."""
        self.target_forwards += 1
        self.grown += done.grown
        self.nodes += record.nodes
        self.drafted += sum(len(layer.pairs) for layer in done.layers)
        self.accepted += sum(judged.verdict.accepted for judged in done.judged)
        self.widths.update(done.widths)
        self.draft_seconds += record.draft_seconds
        self.target_seconds += record.target_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return {
            "target_forwards": self.target_forwards,
            "grown": self.grown,
            "mean_accepted_length": self.mean_accepted_length,
            "mean_width": self.mean_width,
            "widths": {str(width): n for width, n in sorted(self.widths.items())},
            "nodes": self.nodes,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "seconds": self.seconds,
            "draft_seconds": self.draft_seconds,
            "target_seconds": self.target_seconds,
        }


@dataclass(frozen=True, slots=True)
class BeamResult:
    """What one prompt became: at most num_beams different texts, the best first."""

    sequences: list[list[int]]  # new tokens, the one that ended the text included
    # mean log-likelihood per token, under the target's law behind penalties, bias, processors and
    # grammar, untempered
    scores: list[float]
    texts: list[str]  # without end tokens; empty ones where there is no tokenizer
    finish_reasons: list[str]  # "stop", "length" or "context", as in Result
    stats: BeamStats
    promise: Promise  # the law that the texts follow

    @property
    def lossless(self) -> bool:
        """Whether the texts follow the law that is promised of beams."""
        return self.promise.lossless

    @property
    def text(self) -> str:
        """The best text."""
        return self.texts[0]

    @property
    def tokens(self) -> list[int]:
        """The tokens of the best text."""
        return self.sequences[0]

    @property
    def finish_reason(self) -> str:
        """Why the best text ended."""
        return self.finish_reasons[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "texts": self.texts,
            "sequences": self.sequences,
            "scores": self.scores,
            "finish_reasons": self.finish_reasons,
            **self.promise.to_dict(),
            "stats": self.stats.to_dict(),
        }

    def __repr__(self) -> str:
        stats, lossy = self.stats, "" if self.lossless else f", LOSSY: {self.promise.why}"
        return (
            f"BeamResult({len(self.texts)} texts, best {shortened(self.text)!r}, "
            f"score {self.scores[0]:.3f}, {len(self.tokens)} tokens, "
            f"{stats.mean_accepted_length:.2f} tokens per target forward{lossy})"
        )


class BeamSession(Session):
    """A target, a method of beams around it, and a tokenizer if there is one."""

    writes = "beams"

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        **sampling: Unpack[Sampling],
    ) -> Any:
        """Beams after one prompt (a BeamResult) or after each of a batch (a list of them).

        `num_beams` replaces the one the session was loaded with. Temperature, top-k and top-p act
        on the law of all beams together; at temperature 0 that law is a point mass, so one greedy
        text is written.
        """
        prompts, batch = as_batch(prompt, self.tokenizer, self.eos)
        results = self.generate_rows(prompts, max_new_tokens, num_beams, **sampling)
        return results if batch else results[0]

    async def agenerate(
        self,
        prompt: Any,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        **sampling: Unpack[Sampling],
    ) -> Any:
        """`generate` for asyncio: other tasks go on; batches of beams wait for one another.

        A task that is cancelled ends its batch with the step under way.
        """
        prompts, batch = as_batch(prompt, self.tokenizer, self.eos)
        left = Event()
        asked = partial(self.generate_rows, prompts, max_new_tokens, num_beams, left, **sampling)
        try:
            results = await asyncio.get_running_loop().run_in_executor(self.pool, asked)
        except asyncio.CancelledError:
            left.set()
            raise
        return results if batch else results[0]

    def generate_rows(
        self,
        prompts: list[Prompt],
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        left: Event | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[Any]:
        """One BeamResult per prompt, decoded together, at most `max_rows` at a time.

        Once `left` is set nobody waits for them, and they are not written to their ends.
        """
        if sampling.get("stop"):
            raise unwatched(f"stop={sampling['stop']!r}", self.method)
        if sampling.get("prediction") is not None:
            raise ConfigError(
                f"a prediction was passed with method {self.method!r}.",
                "predictions are guessed along one growing text, and beams are several.",
                "leave it out, or use a method that writes one text, such as chain.",
            )
        if sampling.get("guided") is not None and (sampling.get("ignore_eos") or not self.eos):
            raise ConfigError(
                f"guided was asked for with method {self.method!r} and no end tokens.",
                "beams end at end tokens and at max_new_tokens; a grammar ends them by the first.",
                "use a model with end tokens and no ignore_eos, or a method such as chain.",
            )
        rows = self.beam_rows(prompts, max_new_tokens, num_beams, **sampling)
        if rows and (stop := rows[0].state.params.stop):
            raise unwatched(f"the generation config's stop_strings={list(stop)!r}", self.method)
        stats = {row.state.uid: BeamStats() for row in rows}
        with held(self.scheduler.turns), closing(decode(rows, self.engine)) as records:
            self.scheduler.check_models()  # others had their turn since the rows were checked
            before = perf_counter()
            for record in records:
                self.scheduler.check_models()
                now = perf_counter()
                for row, done in zip(record.rows, record.rounds, strict=True):
                    stats[row.state.uid].add(done, record)
                    stats[row.state.uid].seconds += now - before
                before = now
                if left is not None and left.is_set():
                    break
        return [self.beam_result(row, stats[row.state.uid]) for row in rows]

    def beam_rows(
        self,
        prompts: list[Prompt],
        max_new_tokens: int | None,
        num_beams: int | None,
        **sampling: Unpack[Sampling],
    ) -> list[BeamRow]:
        """Checked rows, ready for `engine.beam.decode`."""
        width = self.engine.verifier.config.num_beams if num_beams is None else num_beams
        check_beams(width, self.target.vocab_size)
        states = self.rows(prompts, max_new_tokens, **sampling)
        for state in states:
            if state.params.grammar is not None:  # no beam is over because its grammar is
                state.params.grammar.needs_end = True
        return [BeamRow(state, width) for state in states]

    def beam_result(self, row: BeamRow, stats: BeamStats) -> BeamResult:
        """The texts of a row that ended, the best first as `complete` keeps them."""
        return BeamResult(
            sequences=[list(text.tokens) for text in row.written],
            scores=[text.score for text in row.written],
            texts=[self._written(row.state, text.tokens, text.reason) for text in row.written],
            finish_reasons=[text.reason for text in row.written],
            stats=stats,
            promise=self.engine.promise,
        )

    def _written(self, row: DecodeState, tokens: Sequence[int], reason: str) -> str:
        if self.tokenizer is None:
            return ""
        kept = list(tokens[:-1] if reason == "stop" else tokens)
        decode = decoder(self.tokenizer)
        return text_of(kept, decode, words_before(row, decode))

    def stream(self, *given: Any, **options: Any) -> NoReturn:
        """Refused: the best text is known at the end only."""
        raise ConfigError(
            f"a stream of method {self.method!r} was asked for.",
            "beams overtake each other: which text is the best is known when all have ended.",
            "use generate, or a method that writes one text, such as chain.",
        )


def unwatched(asked: str, method: str) -> ConfigError:
    """Stop texts, which no beam heeds."""
    return ConfigError(
        f"{asked} was asked for with method {method!r}.",
        "beams end at end tokens and at max_new_tokens; stop texts are not watched.",
        "leave it out (generation_config=False) and cut the texts afterwards, or use a method that "
        "writes one text, such as chain.",
    )
