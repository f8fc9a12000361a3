"""What a reader has to know before any number: told at once, and again in the reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from foretoken.bench import environment, memory
from foretoken.types import SamplingParams

# What a generation config may ask for besides, and no measurement follows.
BESIDES = (
    "no_repeat_ngram_size", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
    "exponential_decay_length_penalty", "min_new_tokens", "min_length", "stop_strings",
    "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip
BESIDES_DRAWN = ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
OFF = {"encoder_repetition_penalty": 1.0, "typical_p": 1.0}  # what changes nothing, where not 0
TOKENS = ("forced_bos_token_id", "forced_eos_token_id")  # 0 is one of them


def warned(started: dict[str, Any], missing: list[str], quiet: bool) -> list[str]:
    """What is known before any model is read: what is missing, and whether the machine is busy."""
    found = [*missing] if memory.measurable() else [*missing, memory.MISSING]
    if busy := environment.busy(started):
        found.append(busy)
    return tell(found, quiet)


def tell(found: list[str], quiet: bool) -> list[str]:
    """Print warnings now, and hand them on to the reports."""
    for text in found:
        Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False).print(
            f"warning: {text}", style="yellow", markup=False
        )
    return found


def unlike_configured(
    model: Any, config: Any, flags: Sequence[str] = ("temperature", "top_k", "top_p")
) -> list[str]:
    """A warning where what is measured is not what the model's users get who name no options.

    `config` is what was asked for, and `flags` are those of its options that the command takes.
    """
    own = getattr(model, "generation_config", None)
    if own is None:
        return []
    neutral = SamplingParams()
    said = configured(own, config.temperature > 0)
    here = {name: getattr(config, name, getattr(neutral, name)) for name in said}
    other = [name for name in said if said[name] != here[name]]
    besides = [*BESIDES, *(BESIDES_DRAWN if own.do_sample is True else ())]
    besides = [name for name in besides if asks(name, getattr(own, name, None))]
    if not other and not besides:
        return []
    asked = ", ".join([*(f"{name} {said[name]:g}" for name in other), *besides])
    measured = ", ".join(f"{name} {here[name]:g}" for name in other) or "none of them"
    do = [f"--{name.replace('_', '-')} {said[name]:g}" for name in other if name in flags]
    fields = [name for name in other if name not in flags and hasattr(config, name)]
    never = [name for name in other if not hasattr(config, name)] + besides
    ways = [f"pass {' '.join(do)}"] if do else []
    ways += [f"in Python set {', '.join(fields)} of {type(config).__name__}"] if fields else []
    ways += [f"{', '.join(never)} cannot be asked for here"] if never else []
    return [
        f"this model's generation config says {asked}, which generate, chat and serve follow; "
        f"measured here: {measured} ({'; '.join(ways)})"
    ]


def asks(name: str, value: Any) -> bool:
    """Whether an option of a generation config changes a text."""
    if name in TOKENS:
        return value is not None
    return bool(value) and value != OFF.get(name)


def configured(own: Any, drawn: bool) -> dict[str, float]:
    """What texts follow where a request is silent; `drawn`: a temperature was asked for.

    Greedy texts ignore all but the penalty. A temperature asked of a config that samples nothing is
    no difference: whoever asks gets it.
    """
    samples = own.do_sample is True
    said: dict[str, float] = {"repetition_penalty": 1.0}
    if samples or drawn:  # generate's 50 comes with a config that samples
        said |= {"top_k": 50.0 if samples else 0.0, "top_p": 1.0, "min_p": 0.0}
    if samples:
        said = {"temperature": 1.0, **said}
    found = {name: getattr(own, name, None) for name in said}
    return {name: usual if found[name] is None else found[name] for name, usual in said.items()}
