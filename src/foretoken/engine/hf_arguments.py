"""What transformers' generate hands over: translated where we know it, refused where we cannot."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import CapabilityError, ConfigError
from foretoken.types import DecodeState, SamplingParams

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
# What processors know of each row of a batch, or of each prompt that several rows share, and how it
# is told of one place alone.
BY_BATCH: dict[str, Callable[[Any, int], Any]] = {
    "prompt_ignore_length": lambda lengths, at: int(lengths[at]),
    "encoder_input_ids": lambda ids, at: ids[at : at + 1],
    "generated_ngrams": lambda ngrams, at: ngrams[at : at + 1],
}
UNDERSTOOD = frozenset(
    {"attention_mask", "position_ids", "logits_to_keep", "past_key_values", "use_cache"}
)
# Handed on by transformers for text alone, too: empty, or all zero where no token is an image's.
OF_IMAGES = frozenset({"mm_encoder_outputs", "mm_token_type_ids"})
# Whose token_type_ids are one for images; zero is the prefix of others, or a vector that is added.
ONE_FOR_IMAGES = frozenset({"gemma3", "gemma3n"})


def split_processors(processors: Any, do_sample: bool) -> tuple[dict[str, Any], Any]:
    """Our own options for the warpers at the list's end, and the processors before them."""
    options: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    kept, order = list(processors), list(WARPERS)
    while do_sample and kept and type(kept[-1]).__name__ in order:
        warper, name = kept[-1], type(kept[-1]).__name__
        value = getattr(warper, WARPERS[name])
        if (
            getattr(warper, "filter_value", -torch.inf) != -torch.inf
            or getattr(warper, "min_tokens_to_keep", 1) != 1
            or not takes(WARPERS[name], value)
        ):
            break
        options[WARPERS[name]] = value
        order = order[: order.index(name)]  # only what comes before it may stand before it
        kept.pop()
    return options, type(processors)(kept) if kept else None


def takes(option: str, value: Any) -> bool:
    """Whether we have this value of an option, too: generate's nucleus may be of nothing."""
    try:
        SamplingParams(**{option: value})
    except ConfigError:
        return False
    return True


def for_row(processors: Any, row: int, rows: int) -> Any:
    """The processors of one of so many rows: what they know of the batch becomes this row's.

    Rows of one prompt stand together, and what is known by prompt has fewer entries than rows.
    """
    own = []
    for processor in processors:
        known = {
            name: told(value, row * len(value) // rows)
            for name, told in BY_BATCH.items()
            if isinstance(value := getattr(processor, name, None), Tensor | list)
        }
        if known:
            processor = copy(processor)
            vars(processor).update(known, batch_size=1)
        own.append(processor)
    return type(processors)(own)


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
        check_positions(positions, real)
    padding: list[int] = (~real).sum(1).tolist()
    return padding


def check_positions(positions: Tensor, real: Tensor) -> None:
    """An error unless positions count the real tokens [B, S] from 0; models of images bring several
    planes of them, [3 or 4, B, S], which are all equal where there is text alone."""
    expected = real.long().cumsum(-1) - 1
    planes = positions if positions.dim() == 3 else positions[None]
    if planes.shape[1:] == expected.shape and not bool(((planes != expected) & real).any()):
        return
    if positions.dim() == 3:
        raise CapabilityError(
            "positions of images or videos were passed.",
            "prompts are text here: every plane of position_ids counts the tokens from 0.",
            "pass text alone, or drop custom_generate.",
        )
    raise ConfigError(
        "position_ids of your own were passed.",
        "positions count the prompt's tokens from 0.",
        "leave position_ids to generate.",
    )


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
    typed = model.config.model_type in ONE_FOR_IMAGES
    of_images = OF_IMAGES | {"token_type_ids"} if typed else OF_IMAGES
    wanted = {
        **dict.fromkeys(other_searches(config), True),
        "use_cache=False": model_kwargs.get("use_cache") is False or config.use_cache is False,
        "inputs_embeds": input_ids.shape[1] == 0 or "inputs_embeds" in model_kwargs,
        "synced_gpus": bool(synced_gpus),
        "an encoder-decoder model": bool(model.config.is_encoder_decoder),
        "past_key_values that hold tokens": holds_tokens(model_kwargs.get("past_key_values")),
        "past_key_values for several rows": len(input_ids) > 1 and was_passed(model_kwargs),
        "cache_implementation='quantized'": config.cache_implementation == "quantized",
        "stop_strings": bool(config.stop_strings),
        "images or videos": any(holds_some(model_kwargs.get(name)) for name in of_images),
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
            if name not in UNDERSTOOD | of_images
        },
    }
    asked = [name for name, is_asked in wanted.items() if is_asked]
    if asked:
        raise CapabilityError(
            f"generate was asked for {', '.join(asked)}.",
            "inside generate, foretoken decodes token prompts greedily or by sampling, with "
            "processors, stopping criteria, left padding, a streamer and stop texts of its own.",
            "leave these out (stop_strings go to custom_generate; a cache to fill is empty, of one "
            "row), or drop custom_generate.",
        )


def holds_some(value: Any) -> bool:
    """Whether a tensor is other than zero anywhere, or a collection has anything in it."""
    return bool(value.any()) if isinstance(value, Tensor) else bool(value)


def other_searches(config: Any) -> list[str]:
    """Fields of a generation config that ask for another search than one growing text."""
    wanted = {
        "num_beams": (config.num_beams or 1) > 1,
        "guidance_scale": (config.guidance_scale or 1) != 1,
        **{
            name: bool(getattr(config, name, None))
            for name in ("penalty_alpha", "dola_layers", "constraints", "force_words_ids")
        },
    }
    return [name for name, is_asked in wanted.items() if is_asked]


def holds_tokens(cache: Any) -> bool:
    """Whether a cache that came along is one the caller filled."""
    return cache is not None and int(cache.get_seq_length()) > 0


def was_passed(model_kwargs: dict[str, Any]) -> bool:
    """Whether the cache is the caller's own; `generate` makes one where there is none."""
    return bool(getattr(model_kwargs.get("past_key_values"), "_is_user_defined", False))


def cache_to_fill(model_kwargs: dict[str, Any], config: Any, rows: int) -> Any:
    """The cache that outlives the call: passed by the caller, or returned in a dictionary."""
    outlives = was_passed(model_kwargs) or bool(config.return_dict_in_generate)
    return model_kwargs.get("past_key_values") if outlives and rows == 1 else None


# Arguments beside ours that would do nothing, and what to do instead.
IGNORED = {
    "streamer": "it was given the prompt only; pass streamer= to foretoken.custom_generate",
    "assistant_model": "pass draft= to foretoken.custom_generate, or drop custom_generate",
    "use_mtp": "drop it, or drop custom_generate",
    "prompt_lookup_num_tokens": "use foretoken.custom_generate('prompt-lookup')",
    "assistant_early_exit": "use foretoken.custom_generate('layerskip')",
    "cache_implementation": "leave it out: rows live in a cache of our own during the call",
    "compile_config": "leave it out: forwards are not compiled",
}


def dropped_arguments(custom_generate: Any) -> dict[str, Any]:
    """What `generate` was called with and does not hand on, read from its frame.

    There is no other way to know: it drops both before it calls a custom decoding.
    """
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals
        if frame.f_code.co_name == "generate" and found.get("custom_generate") is custom_generate:
            return {name: found.get(name) for name in ("streamer", "assistant_model")}
        frame = frame.f_back
    return {}


def warn_ignored(dropped: dict[str, Any], config: Any) -> None:
    """One warning for every argument that another way of decoding would have used."""
    for name, instead in IGNORED.items():
        value = dropped.get(name, getattr(config, name, None))
        if value is not None and value is not False:
            warnings.warn(
                f"{name} of generate is ignored beside custom_generate=foretoken...: {instead}.",
                UserWarning,
                stacklevel=5,  # the line that called generate
            )


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
