"""What transformers' generate hands over: translated where we know it, refused where we cannot."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import CapabilityError, ConfigError
from foretoken.types import DecodeState

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


def for_row(processors: Any, row: int) -> Any:
    """The processors of one row: what they know of each row's padding becomes this row's."""
    own = []
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            processor = copy(processor)
            processor.prompt_ignore_length = int(ignored[row])
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
