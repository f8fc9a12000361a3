"""Inside transformers: `model.generate(**inputs, custom_generate=foretoken.custom_generate(...))`.

`generate` hands over the prepared ids, logits processors, stopping criteria and generation config;
it drops its `streamer`, `tokenizer` and `stop_strings` on the way, so those are given to
`custom_generate` instead. What comes back is what `generate` returns. Criteria see one row at a
time, and processors one place of one row: what depends on the rest of the batch is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.coins import SeededCoins, seed_from_torch
from foretoken.engine.loop import Engine, decode
from foretoken.engine.requests import row_seeds, stop_texts
from foretoken.engine.session import check_request, engine_over
from foretoken.engine.text import RowText, decoder, silent_stops
from foretoken.errors import CapabilityError, ConfigError
from foretoken.types import DecodeState, Finish, SamplingParams
from foretoken.warp import Warp

# Warpers our own Warp repeats bit for bit, in transformers' order; attribute -> sampling option.
WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
# Processors that keep a state from call to call, or look across the rows of a batch.
STATEFUL = frozenset(
    {
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "AlternatingCodebooksLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
        "WhisperNoSpeechDetection",
    }
)
BY_ROW = frozenset({"PrefixConstrainedLogitsProcessor"})  # asks for the number of the row
UNDERSTOOD = frozenset(
    {"attention_mask", "position_ids", "logits_to_keep", "past_key_values", "use_cache"}
)


def custom_generate(
    method: str = "chain",
    draft: Any = None,
    streamer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    *,
    seed: int | None = None,
    controller: str | None = None,
    verifier: str | None = None,
    max_rows: int = 16,
    **config: Any,
) -> Inside:
    """A callable for `generate`'s `custom_generate`; keep it and its engine is built once.

    Without `seed`, sampling follows `torch.manual_seed`.
    """
    check_request(method, draft, max_rows)
    stops = stop_texts(stop_strings)
    if stops and tokenizer is None:
        raise ConfigError(
            f"stop_strings={list(stops)!r} was asked for.",
            "stop texts are found in text, and generate does not hand its tokenizer on.",
            "pass tokenizer= to custom_generate.",
        )
    parts = {"controller": controller, "verifier": verifier, **config}
    return Inside(method, draft, streamer, stops, tokenizer, seed, max_rows, parts)


@dataclass(slots=True)
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
    _kept: tuple[Any, Any, Engine] | None = None  # model, its state when the engine was built

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
        refuse_processors(logits_processor or (), len(input_ids))
        if self.streamer is not None and len(input_ids) > 1:
            raise ConfigError(
                f"a streamer was passed with {len(input_ids)} rows.",
                "a streamer tells one text.",
                "generate one prompt at a time, or without a streamer.",
            )
        padding = left_padding(input_ids, model_kwargs)
        engine = self._engine(model)
        with engine.target.attached():
            rows = self._rows(
                input_ids, padding, logits_processor, stopping_criteria, generation_config, engine
            )
            self._run(rows, engine, input_ids)
        sequences = joined(input_ids, rows, generation_config)
        if generation_config.return_dict_in_generate:
            from foretoken.lm.output import decoder_only_output

            return decoder_only_output(sequences)
        return sequences

    def _engine(self, model: Any) -> Engine:
        """The engine over `model`, built anew only when the model or its placement changed."""
        state = (model.device, model.dtype)
        if self._kept is None or self._kept[0] is not model or self._kept[1] != state:
            self._kept = None
            engine, _ = engine_over(model, self.method, self.draft, **self.parts)
            self._kept = (model, state, engine)
        return self._kept[2]

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
        for ids, pad, seed in zip(input_ids, padding, seeds, strict=True):
            tokens = ids[pad:].tolist()
            params = SamplingParams(
                max_new_tokens=max(limit - width, 1),
                processors=WithPadding(rest, ids[:pad]) if rest else None,
                eos=eos,
                **options,
            )
            if seed is None and config.do_sample:
                seed = seed_from_torch()
            row = DecodeState(
                tokens=tokens,
                prompt_len=len(tokens),
                params=params,
                coins=SeededCoins(seed),
                warp=Warp(params, len(tokens), vocab),
            )
            row.ended = self._watch(asked, ids)
            rows.append(row)
        return rows

    def _watch(self, criteria: Any, ids: Tensor) -> Watch | None:
        text = None
        if self.stops:
            silent = silent_stops(self.tokenizer, self.stops)
            text = RowText(decoder(self.tokenizer), self.stops, silent)
        return Watch(criteria, text, ids) if criteria or text else None

    def _run(self, rows: list[DecodeState], engine: Engine, input_ids: Tensor) -> None:
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        with closing(decode(rows, engine, self.max_rows)) as records:
            for record in records:
                if self.streamer is not None:
                    for token in record.emitted[0]:
                        self.streamer.put(torch.tensor([token]))
        if self.streamer is not None:
            self.streamer.end()


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


def split_processors(processors: Any, do_sample: bool) -> tuple[dict[str, Any], Any]:
    """Our own options for the warpers at the list's end, and the processors before them."""
    options: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    kept, order = list(processors), list(WARPERS)
    while do_sample and kept and type(kept[-1]).__name__ in order:
        warper = kept[-1]
        if (
            getattr(warper, "filter_value", -torch.inf) != -torch.inf
            or getattr(warper, "min_tokens_to_keep", 1) != 1
        ):
            break
        name = type(warper).__name__
        options[WARPERS[name]] = getattr(warper, WARPERS[name])
        order = order[: order.index(name)]  # only what comes before it may stand before it
        kept.pop()
    return options, type(processors)(kept) if kept else None


def split_criteria(criteria: Any, max_length: int) -> tuple[int, frozenset[int], Any]:
    """The length limit and end tokens, which rows know themselves, and the criteria that remain."""
    kept, eos = [], set()
    for criterion in criteria:
        match type(criterion).__name__:
            case "MaxLengthCriteria":
                max_length = min(max_length, criterion.max_length)
            case "EosTokenCriteria":
                eos.update(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
            case _:
                kept.append(criterion)
    return max_length, frozenset(eos), type(criteria)(kept)


def left_padding(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Padding tokens before each row; any other mask or numbering is refused."""
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    real = mask.bool() if mask.dim() == 2 else None
    if real is None or not bool((real[:, 1:] >= real[:, :-1]).all() and real[:, -1].all()):
        raise ConfigError(
            "an attention mask that is no left padding was passed.",
            "rows may be padded on the left only, and every prompt token is attended to.",
            "set tokenizer.padding_side = 'left'.",
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = real.long().cumsum(-1) - 1
        if positions.shape != expected.shape or bool((positions != expected)[real].any()):
            raise ConfigError(
                "position_ids of your own were passed.",
                "positions count the prompt's tokens from 0.",
                "leave position_ids to generate.",
            )
    padding: list[int] = (~real).sum(1).tolist()
    return padding


def refuse_processors(processors: Any, rows: int) -> None:
    """A processor that cannot be asked about several places at once would change the law."""
    for processor in processors:
        name = type(processor).__name__
        if name in STATEFUL or (rows > 1 and name in BY_ROW):
            raise CapabilityError(
                f"the logits processor {name} was asked for.",
                "guessing ahead asks processors about places that may be taken back; this one "
                "keeps a state, or depends on the other rows.",
                "leave it out, generate row by row, or use generate without custom_generate.",
            )


def refuse(
    model: Any, input_ids: Tensor, config: Any, synced_gpus: bool, model_kwargs: dict[str, Any]
) -> None:
    """Everything generate offers that this decoding does not."""
    wanted = {
        "num_beams": (config.num_beams or 1) > 1,
        "penalty_alpha": bool(getattr(config, "penalty_alpha", None)),
        "dola_layers": bool(getattr(config, "dola_layers", None)),
        "guidance_scale": (config.guidance_scale or 1) != 1,
        "use_cache=False": model_kwargs.get("use_cache") is False or config.use_cache is False,
        "inputs_embeds": input_ids.shape[1] == 0 or "inputs_embeds" in model_kwargs,
        "synced_gpus": bool(synced_gpus),
        "an encoder-decoder model": bool(model.config.is_encoder_decoder),
        "past_key_values": holds_tokens(model_kwargs.get("past_key_values")),
        "stop_strings": bool(config.stop_strings),
        **{
            name: bool(config.return_dict_in_generate and getattr(config, name))
            for name in ("output_scores", "output_logits", "output_attentions")
        },
        "output_hidden_states": bool(
            config.return_dict_in_generate and config.output_hidden_states
        ),
        **{
            name: value is not None
            for name, value in model_kwargs.items()
            if name not in UNDERSTOOD
        },
    }
    asked = [name for name, is_asked in wanted.items() if is_asked]
    if asked:
        raise CapabilityError(
            f"generate was asked for {', '.join(asked)}.",
            "inside generate, foretoken decodes token prompts greedily or by sampling, with "
            "processors, stopping criteria, left padding, a streamer and stop texts of its own.",
            "leave these out (stop_strings go to custom_generate), or drop custom_generate.",
        )


def holds_tokens(cache: Any) -> bool:
    """Whether a cache that came along is one the caller filled."""
    return cache is not None and int(cache.get_seq_length()) > 0


def joined(input_ids: Tensor, rows: list[DecodeState], config: Any) -> Tensor:
    """Prompts and new tokens as one tensor, shorter rows padded on the right."""
    news = [row.new_tokens for row in rows]
    longest = max(map(len, news))
    pad = config.pad_token_id
    if pad is None:
        pad = getattr(config, "_pad_token_tensor", None)
    if pad is None and min(map(len, news)) < longest:
        raise ConfigError(
            "rows ended at different lengths and there is no padding token.",
            "one tensor holds them all, so the shorter ones are padded.",
            "pass pad_token_id= to generate.",
        )
    padded = [new + [0 if pad is None else int(pad)] * (longest - len(new)) for new in news]
    return torch.cat([input_ids, torch.tensor(padded).to(input_ids)], dim=1)
