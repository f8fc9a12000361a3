"""The front door: load a model once, then generate, stream and batch with it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from foretoken.coins import SeededCoins
from foretoken.engine.assemble import assemble, check_options
from foretoken.engine.loop import Engine
from foretoken.engine.measure import measure_costs
from foretoken.engine.models import check_request, check_words, end_tokens, engine_over
from foretoken.engine.record import Recorder, Stats, StepTrace
from foretoken.engine.requests import (
    SAMPLING,
    Prompt,
    Sampling,
    as_batch,
    check_sampling,
    prompt_ids,
    row_seeds,
    sampling_params,
)
from foretoken.engine.text import RowText, decoder, silent_stops, text_of
from foretoken.errors import ConfigError
from foretoken.methods import Method, default_method
from foretoken.methods import method as method_row
from foretoken.types import DecodeState, Remembers, SamplingParams
from foretoken.warp import Warp


@dataclass(frozen=True, slots=True)
class Result:
    """What one prompt became."""

    text: str  # new text only, without end tokens and stop texts
    tokens: list[int]  # new tokens, the one that ended the row included
    finish_reason: str  # "stop" or "length"
    stats: Stats
    steps: list[StepTrace]  # what was guessed, accepted and emitted in each step


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added."""

    text: str  # may lag behind the tokens: half characters and possible stop texts wait
    tokens: list[int]
    accepted: int  # how many of the tokens were guessed; the last one is the target's own
    corrected: bool  # the target's own token stands where another one was guessed


class Stream(Iterator[Piece]):
    """Pieces of one row while it is written; `result` holds the whole once it has ended."""

    def __init__(self, session: Session, row: DecodeState) -> None:
        self.session, self.row = session, row
        self.recorder = Recorder([row])
        self._pieces = self._write()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Stop here and forget the row."""
        self._pieces.close()

    @property
    def result(self) -> Result:
        """What was written so far, with its statistics."""
        return self.session.result(self.row, self.recorder)

    def _write(self) -> Generator[Piece, None, None]:
        row, session = self.row, self.session
        text = row.ended if isinstance(row.ended, RowText) else None
        self.recorder.resume()
        with closing(session.engine.run([row], session.max_rows)) as records:
            for record in records:
                self.recorder(record)
                trace = self.recorder.steps[row.uid][-1]
                told = "" if text is None else text.take()
                if text is not None and row.finish is not None:
                    told += text.close()
                own = len(trace.emitted) > trace.accepted
                yield Piece(
                    told,
                    list(trace.emitted),
                    trace.accepted,
                    own and trace.accepted < trace.depth,
                )
                self.recorder.resume()


class Session:
    """A target, a method around it, and a tokenizer if there is one."""

    writes = "text"

    def __init__(
        self,
        engine: Engine,
        *,
        method: str,
        tokenizer: Any = None,
        draft: Any = None,
        eos: frozenset[int] = frozenset(),
        max_rows: int = 16,
    ) -> None:
        self.engine, self.method, self.tokenizer = engine, method, tokenizer
        self.target, self.draft = engine.target, draft
        self.eos = frozenset(token for token in eos if 0 <= token < self.target.vocab_size)
        self.max_rows = max_rows
        self._costs_known = not engine.controller.needs_costs

    def generate(self, prompt: Any, max_new_tokens: int = 256, **sampling: Unpack[Sampling]) -> Any:
        """Write after one prompt (a Result) or after each of a batch (a list of Results, in order).

        A prompt is a text or a list of token ids. With `seed=s`, row i of a batch uses s + i: what
        it writes is what the prompt alone writes with that seed.
        """
        prompts, batch = as_batch(prompt)
        results = self.generate_rows(prompts, max_new_tokens, **sampling)
        return results if batch else results[0]

    def generate_rows(
        self, prompts: list[Prompt], max_new_tokens: int = 256, **sampling: Unpack[Sampling]
    ) -> list[Result]:
        """One Result per prompt, decoded together, at most `max_rows` at a time."""
        rows = self.rows(prompts, max_new_tokens, **sampling)
        self.prepare()
        recorder = Recorder(rows)
        with closing(self.engine.run(rows, self.max_rows)) as records:
            for record in records:
                recorder(record)
        return [self.result(row, recorder) for row in rows]

    def stream(
        self, prompt: Any, max_new_tokens: int = 256, **sampling: Unpack[Sampling]
    ) -> Stream:
        """Pieces of one prompt's text as they are committed; joined, they are `generate`'s text.

        Everything is checked before the first piece is asked for. Closing the stream early forgets
        the row.
        """
        prompts, _ = as_batch(prompt)
        if len(prompts) > 1:
            raise ConfigError(
                f"{len(prompts)} prompts were passed to stream.",
                "a stream tells one text.",
                "pass one prompt, or use generate for a batch.",
            )
        row = self.rows(prompts, max_new_tokens, **sampling)[0]
        if row.ended is None and self.tokenizer is not None:
            row.ended = RowText(decoder(self.tokenizer))
        self.prepare()
        return Stream(self, row)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give loaded models back as they were: their own kernels, their own mode."""
        for lm in (self.target, self.draft):
            if lm is not None:
                lm.close()

    def save(self) -> None:
        """Keep what the method has learnt, where it learns and its options name a file."""
        if isinstance(self.engine.drafter, Remembers):
            self.engine.drafter.save()

    def using(self, method: str, **parts: Any) -> Session:
        """The same models with another method around them; `parts` as in `load`."""
        row = check_request(method, self.draft, self.max_rows)
        draft = self.draft if row.needs_draft else None
        engine = assemble(method, self.target, draft, **parts)
        check_words(engine, self.tokenizer)
        return session_class(row)(
            engine,
            method=method,
            tokenizer=self.tokenizer,
            draft=self.draft,
            eos=self.eos,
            max_rows=self.max_rows,
        )

    def rows(
        self, prompts: list[Prompt], max_new_tokens: int = 256, **sampling: Unpack[Sampling]
    ) -> list[DecodeState]:
        """Checked rows, ready for the loop; one bad prompt refuses the batch before any work."""
        options = {"max_new_tokens": max_new_tokens, **sampling}
        check_sampling(options)
        seeds = row_seeds(sampling.get("seed"), len(prompts))
        made = []
        for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            which = "the prompt" if len(prompts) == 1 else f"prompt {i}"
            ids = prompt_ids(
                prompt, self.tokenizer, self.target.vocab_size, self.target.max_length, which
            )
            made.append(self._row(ids, options, seed))
        return made

    def _row(self, ids: list[int], options: dict[str, Any], seed: int | None) -> DecodeState:
        longest = self.target.max_length
        room = None if longest is None else longest - len(ids) + 1  # the last token is not fed
        vocab = self.target.vocab_size
        params = sampling_params(options, vocab, self.eos, room)
        return DecodeState(
            tokens=ids,
            prompt_len=len(ids),
            params=params,
            coins=SeededCoins(seed),
            warp=Warp(params, len(ids), vocab),
            ended=self._watch(params),
        )

    def _watch(self, params: SamplingParams) -> RowText | None:
        if not params.stop:
            return None
        if self.tokenizer is None:
            raise ConfigError(
                f"stop={list(params.stop)!r} was asked for.",
                "stop texts are found in text, and this session has no tokenizer.",
                "pass tokenizer= to load.",
            )
        ids = silent_stops(self.tokenizer, params.stop)
        return RowText(decoder(self.tokenizer), params.stop, ids)

    def result(self, row: DecodeState, recorder: Recorder) -> Result:
        """What became of a row."""
        return Result(
            text=self._text(row),
            tokens=row.new_tokens,
            finish_reason=row.finish.reason if row.finish else "length",
            stats=recorder.stats[row.uid],
            steps=recorder.steps[row.uid],
        )

    def _text(self, row: DecodeState) -> str:
        if self.tokenizer is None:
            return ""
        if isinstance(row.ended, RowText):
            if row.finish is not None:
                row.ended.close()
            return row.ended.text
        tokens = row.new_tokens
        ended = tokens and tokens[-1] in row.params.eos
        return text_of(tokens[:-1] if ended else tokens, decoder(self.tokenizer))

    def prepare(self) -> None:
        """Measure, once, what the controller has to know before the first step."""
        if not self._costs_known:
            self.engine.controller.learn(measure_costs(self.engine))
            self._costs_known = True


def session_class(row: Method) -> type[Session]:
    """The kind of session a method needs: of one text per prompt, or of several."""
    if row.writes == "beams":
        from foretoken.engine.beam_session import BeamSession

        return BeamSession
    return Session


def load(
    target: Any,
    method: str | None = None,
    draft: Any = None,
    tokenizer: Any = None,
    device: Any = None,
    dtype: Any = None,
    *,
    controller: str | None = None,
    verifier: str | None = None,
    exact_bits: bool = False,
    kernels: str = "auto",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    max_rows: int = 16,
    **config: Any,
) -> Session:
    """A session over `target` (directory, hub name or loaded model), decoding with `method`.

    Without `method` it is `chain` where there is a draft, and `auto` where there is none.
    `config` holds fields of the method's drafter, verifier and controller. What cannot work is
    refused here, before any weight is read where that can be known. A method that needs no draft
    leaves `draft` alone.
    """
    method = default_method(draft) if method is None else method
    check_options(method, controller=controller, verifier=verifier, **config)
    from foretoken.lm.load import check_source, load_model, load_tokenizer

    if isinstance(target, str | Path):
        check_source(target, allow_pickle)
    check_request(method, draft, max_rows)

    loading = {
        "device": device,
        "dtype": dtype,
        "allow_pickle": allow_pickle,
        "trust_remote_code": trust_remote_code,
    }
    model = load_model(target, **loading)
    words = load_tokenizer(target, tokenizer)
    engine, draft_lm = engine_over(
        model,
        method,
        draft,
        words=words,
        loading=loading,
        lm_options={"exact_bits": exact_bits, "kernels": kernels},
        controller=controller,
        verifier=verifier,
        **config,
    )
    return session_class(method_row(method))(
        engine,
        method=method,
        tokenizer=words,
        draft=draft_lm,
        eos=end_tokens(model, words),
        max_rows=max_rows,
    )


def generate(
    target: Any, prompt: Any, method: str | None = None, draft: Any = None, **options: Any
) -> Any:
    """Load, write once and forget: `options` are those of `load` and of `Session.generate`."""
    sampling = {name: value for name, value in options.items() if name in SAMPLING}
    check_sampling(sampling)
    loading = {name: value for name, value in options.items() if name not in SAMPLING}
    return load(target, method, draft, **loading).generate(prompt, **sampling)
