"""A session: a loaded model with a method around it, that any number of threads may call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Unpack

from foretoken.coins import SeededCoins
from foretoken.contract import Remembers
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import raise_error
from foretoken.engine.foretold import Foretelling, Foretold
from foretoken.engine.generation_config import GenerationDefaults
from foretoken.engine.load_log import draft_vocabulary_of
from foretoken.engine.models import check_request, check_vocabulary
from foretoken.engine.prepare import teach
from foretoken.engine.record import Recorder
from foretoken.engine.requests import (
    Prompt,
    Sampling,
    as_batch,
    check_sampling,
    given_options,
    kept_bytes,
    of_row,
    placing,
    prompt_ids,
    row_seeds,
    sampling_params,
)
from foretoken.engine.results import Result
from foretoken.engine.scheduling import Scheduler, held, owner_of
from foretoken.engine.stream import Stream
from foretoken.engine.text import RowText, decoder, reader_of, text_of, words_before
from foretoken.errors import ConfigError
from foretoken.lm.views.view import innermost
from foretoken.methods import Method, needs_draft, resolve
from foretoken.row import make_row
from foretoken.types import DecodeState, Step

TASKS = 1024  # of asyncio that may wait for their rows at once


class Session:
    """A target, a method around it, and a tokenizer if there is one.

    Threads and asyncio tasks may call it at the same time: their requests join one batch, and each
    text is the one it would be alone.
    """

    writes = "text"

    def __init__(
        self,
        engine: Any,
        *,
        method: str,
        tokenizer: Any = None,
        draft: Any = None,
        eos: frozenset[int] = frozenset(),
        generation: GenerationDefaults | None = None,
        owns_models: bool = True,
    ) -> None:
        self.engine, self.method, self.tokenizer = engine, method, tokenizer
        self.target, self.draft = engine.target, draft
        self.generation, self.owns_models, self.eos = generation, owns_models, eos
        self._foretelling = Foretelling(tokenizer, self.target.vocab_size, self.eos)
        self.scheduler = Scheduler(engine, *self.models)
        self.preparing = threading.Lock()
        self.prepared = not engine.controller.needs_costs

    @property
    def eos(self) -> frozenset[int]:
        """The ids that end a text; where the generation config is followed, a later change of its
        end tokens counts.
        """
        ends = self._eos
        if self.generation is not None:
            ends = self.generation.ends(ends, self.tokenizer)
        return frozenset(token for token in ends if 0 <= token < self.target.vocab_size)

    @eos.setter
    def eos(self, ends: frozenset[int]) -> None:
        self._eos = ends

    @property
    def foretelling(self) -> Foretelling:
        """Reads what requests say of their texts; anew where other tokens end texts by now."""
        found, ends = self._foretelling, self.eos
        if found.ends != ends:
            found = self._foretelling = Foretelling(self.tokenizer, self.target.vocab_size, ends)
        return found

    @property
    def models(self) -> list[Any]:
        """Target and draft, views of the target aside."""
        return [lm for lm in (self.target, self.draft) if lm is not None]

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """Threads in which asyncio tasks wait for their rows, made as they are needed: who waited
        for one would have no turn by its priority."""
        return ThreadPoolExecutor(TASKS + self.max_rows, thread_name_prefix="foretoken")

    @property
    def max_rows(self) -> int:
        """Rows decoded together; others wait."""
        rows: int = self.engine.max_rows
        return rows

    def __repr__(self) -> str:
        roles = {"target": self.target, "draft": self.draft}
        models = [
            f"{role}={type(owner_of(lm)).__name__}" for role, lm in roles.items() if lm is not None
        ]
        if reduced := draft_vocabulary_of(self.draft):
            models.append(f"draft vocabulary {reduced}")
        words = "without a tokenizer" if self.tokenizer is None else "with a tokenizer"
        state = ["closed"] if getattr(self.target, "closed", False) else []
        told = [f"method={self.method!r}", *models, words, str(self.engine.promise), *state]
        return f"{type(self).__name__}({', '.join(told)})"

    def generate(
        self, prompt: Any, max_new_tokens: int | None = None, **sampling: Unpack[Sampling]
    ) -> Any:
        """Write after one prompt (a Result) or after each of a batch (a list of Results, in order).

        A prompt is a text, a list of token ids, or chat messages. With `seed=s`, row i of a batch
        uses s + i: what it writes is what the prompt alone writes with that seed.
        """
        prompts, batch = as_batch(prompt, self.tokenizer, self.eos)
        results = self.generate_rows(prompts, max_new_tokens, **sampling)
        return results if batch else results[0]

    async def agenerate(
        self, prompt: Any, max_new_tokens: int | None = None, **sampling: Unpack[Sampling]
    ) -> Any:
        """`generate` for asyncio: other tasks go on, and their requests join the same batch.

        A task that is cancelled ends its rows.
        """
        prompts, batch = as_batch(prompt, self.tokenizer, self.eos)
        call = asyncio.get_running_loop().run_in_executor
        rows = await call(self.pool, partial(self.rows, prompts, max_new_tokens, **sampling))
        try:
            results = await call(self.pool, self.write, rows)
        except asyncio.CancelledError:
            for row in rows:
                self.engine.cancel(row)
            raise
        return results if batch else results[0]

    def generate_rows(
        self, prompts: list[Prompt], max_new_tokens: int | None = None, **sampling: Unpack[Sampling]
    ) -> list[Any]:
        """One Result per prompt, decoded together, at most `max_rows` at a time."""
        return self.write(self.rows(prompts, max_new_tokens, **sampling))

    def write(self, rows: list[DecodeState]) -> list[Any]:
        """Decode checked rows; one Result each."""
        recorder = Recorder(rows)
        self.decode(rows, recorder.row)
        return [self.result(row, recorder) for row in rows]

    def decode(
        self, rows: list[DecodeState], watch: Callable[[Step, int], None] = lambda step, at: None
    ) -> None:
        """Run rows to their end; an exception that ends one ends and frees all, and is raised.

        `watch` is told each step of one of them, and its place in the step.
        """
        self.prepare()
        try:
            self.scheduler.submit(rows, watch)
            self.scheduler.wait(
                lambda: (
                    all(row.finish is not None for row in rows)
                    or any(row.error is not None for row in rows)
                )
            )
            self.scheduler.settle()
        finally:
            self.scheduler.drop(rows)
        raise_error(rows)

    def stream(
        self, prompt: Any, max_new_tokens: int | None = None, **sampling: Unpack[Sampling]
    ) -> Stream:
        """Pieces of one prompt's text as they are committed; joined, they are `generate`'s text.

        Everything is checked before the first piece is asked for. Closing the stream early forgets
        the row.
        """
        prompts, _ = as_batch(prompt, self.tokenizer, self.eos)
        if len(prompts) > 1:
            raise ConfigError(
                f"{len(prompts)} prompts were passed to stream.",
                "a stream tells one text.",
                "pass one prompt, or use generate for a batch.",
            )
        row = self.rows(prompts, max_new_tokens, **sampling)[0]
        if row.ended is None and self.tokenizer is not None:
            row.ended = reader_of(row, self.tokenizer, RowText)
        self.prepare()
        return Stream(self, row)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give loaded models back as they were: their own kernels, their own mode.

        What the method has learnt is kept before, as by `save`. A session that `using` made ends
        its own texts only: its models are those of the session it was made from.
        """
        try:
            self.save()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if "pool" in self.__dict__:
            del self.pool  # its threads end with it
        with held(self.scheduler.turns):  # between two steps of whoever decodes
            for lm in self.models if self.owns_models else ():
                lm.close()
            if not self.owns_models and self.writes == "text":  # beams hold their turns to the end
                self.engine.close()

    def refresh(self, full: bool = True) -> int:
        """Take over weights that were changed since the model was loaded; how many there were.

        Every request looks at a sample of each weight; this looks at all of them.
        """
        return sum(lm.refresh(full=full) for lm in self.models)

    def keep_prefixes(self, limit: int | str) -> None:
        """Keep up to so many bytes (or a text such as "512MiB") of keys and values of texts that
        are over; 0: none.

        A request that begins as one of them, by a system prompt or as the next turn of a chat, is
        fed from there on. Models share the bytes by what a token takes in each.
        """
        most = kept_bytes(limit)
        sizes = [lm.layers * lm.hidden_size for lm in self.models]
        with held(self.scheduler.turns):
            for lm, size in zip(self.models, sizes, strict=True):
                lm.keep_prefixes(most * size // sum(sizes))

    def save(self) -> None:
        """Keep what the method has learnt, where it learns and its options name a file."""
        if isinstance(self.engine.drafter, Remembers):
            self.engine.drafter.save()

    def using(self, method: str, **parts: Any) -> Session:
        """The same models with another method around them; `parts` as in `load`.

        The models stay this session's: closing the new one ends its texts and gives none back.
        """
        parts = {"max_rows": self.max_rows, **parts}
        row = check_request(method, self.draft, parts["max_rows"])
        draft = self.draft if needs_draft(row) else None
        engine = assemble(method, innermost(self.target), draft, **parts)
        check_vocabulary(engine, self.tokenizer)
        return session_class(row)(
            engine, method=method, tokenizer=self.tokenizer, draft=self.draft, eos=self._eos,
            generation=self.generation, owns_models=False,
        )  # fmt: skip

    def rows(
        self, prompts: list[Prompt], max_new_tokens: int | None = None, **sampling: Unpack[Sampling]
    ) -> list[DecodeState]:
        """Checked rows, ready for the engine; one bad prompt refuses the batch before any work."""
        for lm in self.models:
            lm.check_usable()
            lm.refresh()
        options = given_options({"max_new_tokens": max_new_tokens, **sampling})
        check_sampling(options)
        seeds = row_seeds(sampling.get("seed"), len(prompts))
        foretold = self.foretelling.of(options, len(prompts))
        made, target = [], self.target
        for i, (prompt, seed, told) in enumerate(zip(prompts, seeds, foretold, strict=True)):
            which = "the prompt" if len(prompts) == 1 else f"prompt {i}"
            ids = prompt_ids(prompt, self.tokenizer, target.vocab_size, target.max_length, which)
            made.append(self._row(ids, of_row(options, i, len(prompts)), seed, told))
        return made

    def _row(
        self, ids: list[int], options: dict[str, Any], seed: int | None, told: Foretold
    ) -> DecodeState:
        longest, vocab, eos = self.target.max_length, self.target.vocab_size, self.eos
        if self.generation is not None:
            options = self.generation.options(options, ids, eos, vocab)
        params = replace(sampling_params(options, vocab, eos), seed=seed)
        params = self.foretelling.guide(told, len(ids), params)
        longest = None if longest is None else longest + 1  # the last token is not fed
        row = make_row(ids, params, SeededCoins(seed), vocab, longest=longest)
        row.ended = reader_of(row, self.tokenizer, RowText) if params.stop else None
        for name, value in placing(options).items():
            setattr(row, name, value)
        return self.foretelling.expect(told, row)

    def result(self, row: DecodeState, recorder: Recorder) -> Result:
        """What became of a row."""
        return Result(
            text=self._text(row),
            tokens=row.new_tokens,
            finish_reason=row.finish.reason if row.finish else "unfinished",
            stats=recorder.stats[row.uid],
            steps=recorder.steps[row.uid],
            promise=self.engine.promise,
        )

    def _text(self, row: DecodeState) -> str:
        if self.tokenizer is None:
            return ""
        if isinstance(row.ended, RowText):
            if row.finish is not None:
                row.ended.close()
            return row.ended.text
        tokens, decode = row.new_tokens, decoder(self.tokenizer)
        ended = tokens and tokens[-1] in row.params.eos
        return text_of(tokens[:-1] if ended else tokens, decode, words_before(row, decode))

    def prepare(self, batches: bool = False) -> None:
        """Measure, once, what the controller has to know before the first step; of batches, too."""
        with self.preparing:
            if batches or not self.prepared:
                with held(self.scheduler.turns):
                    teach(self.engine, lone=not self.prepared, batches=batches)
                self.prepared = True


SESSIONS = {"text": "engine.session:Session", "beams": "engine.beam_session:BeamSession"}


def session_class(row: Method) -> type[Session]:
    """The kind of session a method needs: of one text per prompt, or of several."""
    found: type[Session] = resolve(SESSIONS[row.writes])
    return found
