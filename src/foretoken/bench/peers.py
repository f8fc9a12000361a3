"""transformers' own `generate` in four forms, called as a user would call it.

Every form gets the same prompt ids, the same options, the same end tokens, and a model that none of
our kernels has touched.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from foretoken.bench.own import Outcome, finish_device
from foretoken.bench.rows import RowSpec
from foretoken.bench.tuning import TunedRow
from foretoken.errors import CapabilityError
from foretoken.types import SamplingParams

# (drafted tokens, schedule, confidence below which drafting stops); the last is the default
ASSISTED_SETTINGS: tuple[dict[str, Any], ...] = tuple(
    {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": schedule,
        "assistant_confidence_threshold": threshold,
    }
    for tokens, schedule, threshold in (
        (3, "constant", 0.0),
        (5, "constant", 0.0),
        (8, "constant", 0.0),
        (5, "heuristic", 0.0),
        (5, "constant", 0.4),
        (8, "heuristic", 0.4),
        (20, "constant", 0.4),
    )
)
SHORT = {
    "num_assistant_tokens": "tokens",
    "num_assistant_tokens_schedule": "schedule",
    "assistant_confidence_threshold": "threshold",
    "prompt_lookup_num_tokens": "tokens",
}
LOOKUP_SETTINGS: tuple[dict[str, Any], ...] = tuple(
    {"prompt_lookup_num_tokens": tokens} for tokens in (3, 5, 10)
)


@dataclass(slots=True)
class Clock:
    """Forwards of one model: how many, and on a CPU how long."""

    calls: int = 0
    seconds: float = 0.0
    began: float = 0.0

    @contextmanager
    def watching(self, model: PreTrainedModel | None) -> Iterator[None]:
        """Hooks for one text only: the compiled form shares the model and must not see them."""
        self.calls, self.seconds = 0, 0.0
        if model is None:
            yield
            return
        hooks = (
            model.register_forward_pre_hook(self._start),
            model.register_forward_hook(self._stop),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _start(self, *_: Any) -> None:
        self.began = perf_counter()

    def _stop(self, *_: Any) -> None:
        self.calls += 1
        self.seconds += perf_counter() - self.began


class PeerRow(TunedRow):
    """One form of `generate`."""

    short = SHORT
    counted = True  # hooks on the model may count its forwards

    def __init__(
        self, spec: RowSpec, model: PreTrainedModel, draft: PreTrainedModel | None = None
    ) -> None:
        super().__init__(spec)
        self.model, self.draft = model, draft
        model.generation_config = bare(model.generation_config)
        self.target_clock, self.draft_clock = Clock(), Clock()

    def extra(self) -> dict[str, Any]:
        """What this form adds to the call of `generate`."""
        return {}

    def write(self, prompt: Sequence[int], params: SamplingParams) -> Outcome:
        config = self.model.generation_config
        config.eos_token_id = sorted(params.eos) or None
        ids = torch.tensor([list(prompt)], device=self.model.device)
        watched = self.model if self.counted else None
        with (
            _quiet(),
            self.target_clock.watching(watched),
            self.draft_clock.watching(self.draft),
        ):
            if params.temperature > 0:
                torch.manual_seed(params.seed or 0)
            finish_device()
            began = perf_counter()
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=params.max_new_tokens,
                pad_token_id=min(params.eos, default=0),
                **_sampling(params),
                **self.extra(),
            )
            finish_device()
            seconds = perf_counter() - began
        tokens = _until_end(out[0, len(prompt) :].tolist(), params.eos)
        on_cpu = self.model.device.type == "cpu" and self.counted
        return Outcome(
            tokens=tokens,
            seconds=seconds,
            draft=self.draft_clock.seconds if on_cpu else None,
            target=self.target_clock.seconds if on_cpu else None,
            forwards=self.target_clock.calls if self.counted else len(tokens),
        )


class Plain(PeerRow):
    """`generate` as it is."""


class Compiled(PeerRow):
    """Static cache and torch.compile; on a CPU with inductor's default mode."""

    counted = False  # a hook inside would be compiled too

    def __init__(
        self, spec: RowSpec, model: PreTrainedModel, draft: PreTrainedModel | None = None
    ) -> None:
        super().__init__(spec, model, draft)
        on_gpu = model.device.type == "cuda"
        self.compile = CompileConfig(mode="reduce-overhead" if on_gpu else "default")
        self.compile._compile_all_devices = True  # transformers compiles on a CPU only if told
        self.note = f"static cache, inductor mode {self.compile.mode}"

    def extra(self) -> dict[str, Any]:
        return {"cache_implementation": "static", "compile_config": self.compile}


class Assisted(PeerRow):
    """Assisted generation with the same draft model."""

    settings = ASSISTED_SETTINGS
    own: Any = None  # the draft's generation config with this row's setting
    tokenizers: tuple[Any, Any] | None = None  # of target and draft, where widths differ

    @property
    def through_text(self) -> bool:
        """Whether guesses go through text: `generate` takes them as ids at equal widths only."""
        assert self.draft is not None
        return width(self.model) != width(self.draft)

    def read_with(self, target: Any, draft: Any) -> None:
        """The tokenizers that guesses go through; CapabilityError where one is missing."""
        assert self.draft is not None
        if target is None or draft is None:
            raise CapabilityError(
                f"the row {self.spec.label} with a target of {width(self.model)} tokens and a "
                f"draft of {width(self.draft)}.",
                "where the widths differ, transformers' generate hands guesses on as text, and "
                f"the {'target' if target is None else 'draft'} has no tokenizer.",
                "save a tokenizer beside that model, or leave the row out.",
            )
        self.tokenizers = target, draft

    def apply(self, setting: Mapping[str, Any]) -> None:
        super().apply(setting)
        assert self.draft is not None
        self.own = copy.deepcopy(self.draft.generation_config)
        self.own.update(**setting)

    def write(self, prompt: Sequence[int], params: SamplingParams) -> Outcome:
        """The draft is shared by all such rows of a bench: it has this one's setting for the
        length of a text, and what a schedule made of it meanwhile stays with this row.
        """
        draft = self.draft
        if draft is None or self.own is None:
            return super().write(prompt, params)
        shared, draft.generation_config = draft.generation_config, self.own
        try:
            return super().write(prompt, params)
        finally:
            self.own, draft.generation_config = draft.generation_config, shared

    def extra(self) -> dict[str, Any]:
        found: dict[str, Any] = {"assistant_model": self.draft}
        if self.tokenizers is not None:
            found["tokenizer"], found["assistant_tokenizer"] = self.tokenizers
        return found


class Lookup(PeerRow):
    """Prompt lookup decoding."""

    settings = LOOKUP_SETTINGS

    def extra(self) -> dict[str, Any]:
        return dict(self.setting)


FORMS: dict[str, type[PeerRow]] = {
    "hf:plain": Plain,
    "hf:compiled": Compiled,
    "hf:assisted": Assisted,
    "hf:prompt-lookup": Lookup,
}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """The options both sides know; a greedy call names none of the others."""
    if params.temperature == 0:
        return {"do_sample": False, "repetition_penalty": params.repetition_penalty}
    return {
        "do_sample": True,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p or None,
        "repetition_penalty": params.repetition_penalty,
    }


def bare(config: Any) -> GenerationConfig:
    """The tokens that begin, fill and end a text, and no option: texts of all rows follow what the
    bench was asked for, and nothing that a model asks for besides."""
    names = ("bos_token_id", "pad_token_id", "eos_token_id")
    return GenerationConfig(**{name: getattr(config, name) for name in names})


def width(model: PreTrainedModel) -> int:
    """Rows of a model's output, as `generate` counts them."""
    return int(model.config.get_text_config().vocab_size)


def _until_end(tokens: list[int], eos: frozenset[int]) -> list[int]:
    """The one token counter: new ids up to and with the first end token."""
    for n, token in enumerate(tokens):
        if token in eos:
            return tokens[: n + 1]
    return tokens


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings for one call, and only for it."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
