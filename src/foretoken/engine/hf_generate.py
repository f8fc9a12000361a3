"""Inside transformers: `model.generate(**inputs, custom_generate=foretoken.custom_generate(...))`.

`generate` hands over the prepared ids, logits processors, stopping criteria and generation config;
it drops its `streamer`, `tokenizer` and `stop_strings` on the way, so those are given to
`custom_generate` instead. What comes back is what `generate` returns, and a cache that was passed
is filled as `generate` fills it. Criteria see one row at a time, and processors one place of one
row: what depends on the rest of the batch is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from foretoken.coins import SeededCoins, seed_from_torch
from foretoken.contract import Remembers
from foretoken.engine.assemble import check_options
from foretoken.engine.borrowed_model import BorrowedModel
from foretoken.engine.engine import Engine, decode
from foretoken.engine.hf_arguments import (
    cache_to_fill,
    dropped_arguments,
    for_row,
    joined,
    left_padding,
    refuse,
    refuse_processors,
    split_criteria,
    split_processors,
    warn_ignored,
)
from foretoken.engine.hf_lengths import check_lengths
from foretoken.engine.loading import usual_method
from foretoken.engine.models import check_request, engine_over
from foretoken.engine.prepare import teach_costs
from foretoken.engine.promise import promise_of_row
from foretoken.engine.requests import row_seeds, stop_texts
from foretoken.engine.scheduling import held, turns_of
from foretoken.engine.text import RowText, decoder, silent_stops, words_before
from foretoken.errors import CheckpointError, ConfigError
from foretoken.lm.views.view import innermost, keeper
from foretoken.methods import method as method_row
from foretoken.row import make_row
from foretoken.types import DecodeState, Finish, SamplingParams, Step

if TYPE_CHECKING:
    from foretoken.lm.runtime.cached import CachedLM


def custom_generate(
    method: str | None = None,
    draft: Any = None,
    streamer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    *,
    seed: int | None = None,
    controller: str | None = None,
    verifier: str | None = None,
    kernels: str = "auto",
    max_rows: int = 16,
    **config: Any,
) -> Inside:
    """A callable for `generate`'s `custom_generate`; keep it and its engine is built once.

    Without `method` it is the one that `load` takes: a `draft_head` has its own. Without `seed`,
    sampling follows `torch.manual_seed`. Kernels are in place during calls only.
    """
    if method is None:
        method = usual_method(draft, config.get("draft_head"), controller, verifier)
    row = check_request(method, draft, max_rows)
    if row.writes != "text":
        raise ConfigError(
            f"method {method!r} was asked for inside generate.",
            "generate takes one text per prompt back; this method writes a scored set of them.",
            "use foretoken.load(...).generate(...), or a method such as chain.",
        )
    if kernels == "lean":
        raise ConfigError(
            "kernels='lean' was asked for inside generate.",
            "lean frees the model's own weights, and this model is yours again after each call.",
            "use kernels='auto' or 'dense'.",
        )
    stops = stop_texts(stop_strings)
    if stops and tokenizer is None:
        raise ConfigError(
            f"stop_strings={list(stops)!r} was asked for.",
            "stop texts are found in text, and generate does not hand its tokenizer on.",
            "pass tokenizer= to custom_generate.",
        )
    check_options(method, controller=controller, verifier=verifier, **config)
    parts = {"controller": controller, "verifier": verifier, **config}
    return Inside(method, draft, streamer, stops, tokenizer, seed, max_rows, parts, kernels)


@dataclass(slots=True, repr=False)
class Inside:
    """What `generate` calls in place of its own decoding."""

    method: str
    draft: Any
    streamer: Any
    stops: tuple[str, ...]
    tokenizer: Any
    seed: int | None
    max_rows: int
    parts: dict[str, Any]
    kernels: str
    _kept: tuple[list[BorrowedModel], Engine] | None = None
    _used: Any = field(default_factory=Lock)  # held by the call that decodes with what is kept
    _told: bool = False  # that its texts follow another law, if they do

    def __repr__(self) -> str:
        draft = "" if self.draft is None else f", draft={type(self.draft).__name__}"
        chosen = {name: value for name, value in self.parts.items() if value is not None}
        options = "".join(f", {name}={value!r}" for name, value in chosen.items())
        lossy = "" if self.lossless else ", LOSSY"
        return f"custom_generate(method={self.method!r}{draft}{options}{lossy})"

    @property
    def lossless(self) -> bool:
        """Whether its texts follow the target's own law; before a call, as its parts say."""
        if (kept := self._kept) is not None:
            return kept[1].promise.lossless
        row = method_row(self.method)
        rule = self.parts["verifier"] or row.verifier
        return promise_of_row(replace(row, verifier=rule)).lossless

    # generate looks at this signature: a parameter named like one of its own keyword arguments
    # would take that argument away from it, so everything else stays in `model_kwargs`.
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        refuse(model, input_ids, generation_config, synced_gpus, model_kwargs)
        warn_ignored(dropped_arguments(self), generation_config)
        refuse_processors(logits_processor or (), len(input_ids))
        if self.streamer is not None and len(input_ids) > 1:
            raise ConfigError(
                f"a streamer was passed with {len(input_ids)} rows.",
                "a streamer tells one text.",
                "generate one prompt at a time, or without a streamer.",
            )
        padding = left_padding(input_ids, model_kwargs)
        longest = split_criteria(stopping_criteria or [], generation_config.max_length)[0]
        check_lengths(model, padding, input_ids.shape[1], longest)
        with held(turns_of(model)), ExitStack() as borrowed:
            engine = self._engine(model, borrowed)
            rows = self._rows(
                input_ids, padding, logits_processor, stopping_criteria, generation_config, engine
            )
            cache = cache_to_fill(model_kwargs, generation_config, len(rows))
            self._run(rows, engine, input_ids, cache)
            save_learnt(engine.drafter)
        sequences = joined(input_ids, rows, generation_config)
        if generation_config.return_dict_in_generate:
            from foretoken.lm.output import decoder_only_output

            return decoder_only_output(sequences, cache)
        return sequences

    def _engine(self, model: Any, borrowed: ExitStack) -> Engine:
        """The engine over a borrowed model; built anew only for another model, type or place, or
        where another call, of a thread beside or around this one, decodes with what is kept."""
        alone = self._used.acquire(blocking=False)
        if alone:
            borrowed.callback(self._used.release)
        if alone and self._kept is not None:
            models, engine = self._kept
            if models[0].current(model) and all(other.current(other.lm.model) for other in models):
                for kept in models:
                    borrowed.enter_context(kept.taken())
                return engine
            for other in models:
                other.lm.close()
            self._kept = None
        engine, draft_lm = engine_over(
            model,
            self.method,
            self.draft,
            tokenizer=self.tokenizer,
            lm_options={"kernels": self.kernels},
            **self.parts,
        )
        lms: list[Any] = [innermost(engine.target)]
        lms += [] if draft_lm is None else [draft_lm]
        for lm in lms:
            borrowed.callback(lm.borrowing.give_back if alone else lm.close)
        if engine.controller.needs_costs:
            teach_costs(engine)
        made: Engine = engine
        if alone:
            self._kept = [BorrowedModel(lm) for lm in lms], made
        if not (self._told or made.promise.lossless):
            self._told = True
            warnings.warn(str(made.promise), UserWarning, stacklevel=5)  # the line of generate
        return made

    def _rows(
        self,
        input_ids: Tensor,
        padding: list[int],
        processors: Any,
        criteria: Any,
        config: Any,
        engine: Engine,
    ) -> list[DecodeState]:
        width, vocab = input_ids.shape[1], engine.target.vocab_size
        options, rest = split_processors(processors or [], config.do_sample)
        limit, eos, asked = split_criteria(criteria or [], config.max_length)
        seeds = row_seeds(self.seed, len(padding))
        rows = []
        for i, (ids, pad, seed) in enumerate(zip(input_ids, padding, seeds, strict=True)):
            if seed is None and config.do_sample:
                seed = seed_from_torch()
            params = SamplingParams(
                max_new_tokens=max(limit - width, 1),
                processors=WithPadding(for_row(rest, i, len(padding)), ids[:pad]) if rest else None,
                eos=eos,
                seed=seed,
                **options,
            )
            row = make_row(ids[pad:].tolist(), params, SeededCoins(seed), vocab)
            row.ended = self._watch(asked, ids, row)
            rows.append(row)
        return rows

    def _watch(self, criteria: Any, ids: Tensor, row: DecodeState) -> Watch | None:
        text = None
        if self.stops:
            decode, silent = decoder(self.tokenizer), silent_stops(self.tokenizer, self.stops)
            text = RowText(decode, self.stops, silent, before=words_before(row, decode))
        return Watch(criteria, text, ids) if criteria or text else None

    def _run(self, rows: list[DecodeState], engine: Engine, input_ids: Tensor, cache: Any) -> None:
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        with filling(cache, engine), closing(decode(rows, engine, self.max_rows)) as steps:
            for step in steps:
                if self.streamer is not None:
                    for token in step.emitted[0]:
                        self.streamer.put(torch.tensor([token]))
        if self.streamer is not None:
            self.streamer.end()


def save_learnt(drafter: Any) -> None:
    """Keep what a drafter has learnt, where its options name a file: no session does at its end.

    The texts are written by now, and are not lost where the file cannot be.
    """
    if not isinstance(drafter, Remembers):
        return
    try:
        drafter.save()
    except CheckpointError as problem:
        warnings.warn(str(problem), UserWarning, stacklevel=5)  # the line of generate


@contextmanager
def filling(cache: Any, engine: Engine) -> Iterator[None]:
    """Write the keys and values of the only row into `cache`, where there is one, as it ends."""
    if cache is None:
        yield
        return
    from foretoken.lm.output import fill_cache  # loads transformers

    def keep(step: Step) -> None:
        [row] = step.rows
        if row.finish is not None:  # its keys and values are forgotten after this step
            fill_cache(cast("CachedLM", keeper(engine.target)), row, cache)

    engine.listeners.append(keep)
    try:
        yield
    finally:
        engine.listeners.remove(keep)


class WithPadding:
    """Processors see the row as `generate` would show it: with its left padding."""

    def __init__(self, processors: Any, padding: Tensor) -> None:
        self.processors, self.padding = processors, padding

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        padded = torch.cat([self.padding.to(ids.device).expand(len(ids), -1), ids], dim=1)
        processed: Tensor = self.processors(padded, scores)
        return processed


class Watch:
    """Asks stopping criteria and stop texts after every single token of a row."""

    def __init__(self, criteria: Any, text: RowText | None, ids: Tensor) -> None:
        self.criteria, self.text = criteria, text
        self.length = len(ids)
        self.seen = torch.empty(1, 2 * len(ids) + 64, dtype=ids.dtype, device=ids.device)
        self.seen[0, : self.length] = ids

    def __call__(self, row: DecodeState) -> Finish | None:
        if self.length == self.seen.shape[1]:
            self.seen = torch.cat([self.seen, torch.empty_like(self.seen)], dim=1)
        self.seen[0, self.length] = row.tokens[-1]
        self.length += 1
        ended = self.text is not None and self.text.feed(row.tokens[-1]) is not None
        if self.criteria:  # asked even then: a criterion may count its calls
            ids = self.seen[:, : self.length]
            ended = bool(torch.as_tensor(self.criteria(ids, None)).all()) or ended
        return Finish("stop") if ended else None
