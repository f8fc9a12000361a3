"""A model's generation config under the options of each request, as transformers' generate has it.

Explicit options win, then the fields of a config that was passed, then the model's own, then the
defaults of transformers. Transformers builds the logits processors; those that `Warp` repeats bit
for bit become sampling options, the others are called as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from foretoken.engine.hf_arguments import other_searches, refuse_processors, split_processors
from foretoken.engine.models import end_tokens
from foretoken.engine.requests import KINDS, listed_processors
from foretoken.errors import CapabilityError, ConfigError
from foretoken.types import SamplingParams

# Options of a request that generate knows by the same name; temperature stands for do_sample too.
SHARED = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
)

SAMPLED_ONLY = (
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip


def generation_defaults(model: Any, given: Any = None) -> GenerationDefaults | None:
    """The defaults of a session over `model`; None where its config is left aside (False)."""
    if given is False or getattr(model, "generation_config", None) is None:
        return None
    return GenerationDefaults(model, given)


class GenerationDefaults:
    """What `model.generation_config`, or a config in its place, says where a request is silent.

    The config is read anew for each request, so that a later change of it counts.
    """

    def __init__(self, model: Any, given: Any = None) -> None:
        self.model, self.given = model, given
        known = type(model.generation_config)
        if given is not None and not isinstance(given, known):
            raise ConfigError(
                f"generation_config={given!r} was passed.",
                "it is a transformers GenerationConfig; False ignores the model's own.",
                "pass generation_config=GenerationConfig(...), False, or nothing.",
            )
        self.named = end_tokens(model, None, given)  # at load, which may know others
        self._check()

    def _check(self) -> None:
        """Refuse, by name, what no request could honour."""
        config = self._config()
        asked = [*other_searches(config)]
        asked += ["num_return_sequences"] if (config.num_return_sequences or 1) > 1 else []
        asked += [name for name in ("token_healing", "max_time") if getattr(config, name, None)]
        asked += ["cache_implementation"] if config.cache_implementation == "quantized" else []
        if asked:
            raise CapabilityError(
                f"the generation config asks for {', '.join(asked)}.",
                "a session decodes greedily or by sampling, one text per prompt, with the config's "
                "lengths, stop strings and logits processors.",
                "pass load(..., generation_config=False) to leave the config aside, or a "
                "GenerationConfig in which these are neutral.",
            )
        self._build(config, [0, 0], frozenset({0}), 1, ())

    def _config(self) -> Any:
        """The passed config's fields, then the model's own; None where neither says anything."""
        own = self.model.generation_config
        if self.given is None:
            return copy.deepcopy(own)
        config = copy.deepcopy(self.given)
        for name, value in vars(own).items():
            if getattr(config, name, None) is None:
                setattr(config, name, copy.deepcopy(value))
        return config

    def ends(self, loaded: frozenset[int], tokenizer: Any) -> frozenset[int]:
        """The end tokens now: those of the time of loading until the config names others."""
        if end_tokens(self.model, None, self.given) == self.named:
            return loaded
        return end_tokens(self.model, tokenizer, self.given)

    @property
    def samples(self) -> bool:
        """Whether a text is drawn where a request says no temperature."""
        return self._config().do_sample is True

    def options(
        self, asked: Mapping[str, Any], ids: Sequence[int], eos: frozenset[int], vocab_size: int
    ) -> dict[str, Any]:
        """The options of one row: what was asked for, and what the config adds to it."""
        known: dict[str, Any] = {n: plain(n, asked[n]) for n in SHARED if n in asked}
        SamplingParams(**known)  # a bad value is the caller's, and named as such
        config = self._config()
        if config.do_sample is not True and config.top_k is None:
            config.top_k = 0  # generate's 50 comes with a config that samples
        for name, value in known.items():
            setattr(config, name, value)
        if "temperature" in known:
            config.do_sample = known["temperature"] > 0
            config.temperature = known["temperature"] if config.do_sample else None
        config.min_new_tokens = shortest(config, len(ids))
        config.max_new_tokens = longest(config, len(ids))
        processors = asked.get("processors")
        if processors is not None and not callable(processors):
            return dict(asked)  # refused with all other wrong types
        own = listed_processors(processors)
        ends = frozenset() if asked.get("ignore_eos") else eos
        built = self._build(config, ids, ends, config.max_new_tokens, own)
        leading, rest = split_leading(built, own)
        sampled, rest = split_processors(rest, bool(config.do_sample))
        banned = {token for token in leading.pop("banned_tokens", ()) if token < vocab_size}
        options = {
            **{name: value for name, value in asked.items() if name not in known},
            **leading,
            **sampled,
            # however it holds back end tokens, and if there are none: stop texts wait as well
            "min_new_tokens": config.min_new_tokens,
            "max_new_tokens": config.max_new_tokens,
            "processors": rest,
        }
        if banned:
            options["banned_tokens"] = (*banned, *asked.get("banned_tokens", ()))
        if config.stop_strings and "stop" not in asked:  # an empty list asks for none
            options["stop"] = config.stop_strings
        return options

    def _build(
        self,
        config: Any,
        ids: Sequence[int],
        eos: frozenset[int],
        new_tokens: int,
        own: Sequence[Any],
    ) -> Any:
        """Transformers' list of processors for one row."""
        if config.do_sample is not True:  # transformers would warn of what greedy text ignores
            for name in SAMPLED_ONLY:
                setattr(config, name, None)
        config.update(**config._get_default_generation_params(), defaults_only=True)
        config.eos_token_id = sorted(eos) or None
        config.max_length, config.min_length = len(ids) + new_tokens, 0
        self.model._prepare_special_tokens(config, True, device=self.model.device, batch_size=1)
        encoded = None  # the prompt, for penalties that look at it alone
        if (config.encoder_repetition_penalty or 1) != 1 or config.encoder_no_repeat_ngram_size:
            encoded = torch.tensor([list(ids)], device=self.model.device)
        processors = self.model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(ids),
            encoder_input_ids=encoded,
            logits_processor=own,
            device=self.model.device,
            model_kwargs={},
        )
        refuse_processors([p for p in processors if not any(p is one for one in own)], 1)
        return processors


def plain(name: str, value: Any) -> int | float:
    """A number that was checked, of the type that transformers asks for by name: it refuses whole
    temperatures and the scalars of numpy.
    """
    return int(value) if KINDS[name][0] is Integral else float(value)


def split_leading(processors: Any, own: Sequence[Any]) -> tuple[dict[str, Any], Any]:
    """Our own options for processors at the list's start, in the order `Warp` applies them.

    A processor that the caller passed stays one: it comes after all options.
    """
    order = {
        "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty"),
        "MinNewTokensLengthLogitsProcessor": ("min_new_tokens", "min_new_tokens"),
        "SuppressTokensLogitsProcessor": ("banned_tokens", "suppress_tokens"),
    }
    options: dict[str, Any] = {}
    left, kept = list(order), list(processors)
    while kept and type(kept[0]).__name__ in left and not any(kept[0] is one for one in own):
        first = kept.pop(0)
        name = type(first).__name__
        option, attribute = order[name]
        value = getattr(first, attribute)
        options[option] = value.flatten().tolist() if isinstance(value, torch.Tensor) else value
        left = left[left.index(name) + 1 :]
    return options, type(processors)(kept)


def shortest(config: Any, prompt: int) -> int:
    """New tokens before which no end token may come."""
    if config.min_new_tokens is not None:
        return int(config.min_new_tokens)
    return max(int(config.min_length or 0) - prompt, 0)


def longest(config: Any, prompt: int) -> int:
    """Most new tokens: those asked for, else what `max_length` leaves, else the default."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if config.max_length is None:
        return SamplingParams().max_new_tokens
    if config.max_length > prompt:
        return int(config.max_length) - prompt
    raise ConfigError(
        f"a prompt of {prompt} tokens was passed.",
        f"the generation config's max_length={config.max_length} counts the prompt too, and leaves "
        "no room for a new token.",
        "pass max_new_tokens=, or a shorter prompt.",
    )
