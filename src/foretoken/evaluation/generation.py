"""What a task asks of generation, as a generation config: said as `generate` would be told it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.errors import ConfigError, meant

# Fields that `generate` honours and a session has another way to be told.
ELSEWHERE = {
    "max_length": "max_gen_toks, which counts new tokens only",
    "eos_token_id": "until, with the end token's text",
    "stop_strings": "until",
}


def generation_config(model: Any, asked: Mapping[str, Any]) -> Any:
    """A config that holds what was asked for, of the kind that `model` has; the model's own says
    the rest.
    """
    kind = type(model.generation_config)
    known = {name for name in vars(kind()) if not name.startswith("_")} - ELSEWHERE.keys()
    for name in asked:
        if name in ELSEWHERE:
            raise ConfigError(
                f"the task asks for {name} in its generation_kwargs.",
                "lengths and ends are told in lm-eval's own words.",
                f"use {ELSEWHERE[name]}.",
            )
        if name not in known:
            raise ConfigError(
                f"the task asks for {name!r} in its generation_kwargs.",
                "beside until and max_gen_toks, these are fields of a transformers "
                f"GenerationConfig: {', '.join(sorted(known))}.",
                meant(name, known),
            )
    return kind(**asked)


def most_new_tokens(model: Any, asked: int, until: list[str]) -> int:
    """New tokens at most: those asked for, unless the model's config has a number of its own,
    which wins in `generate`. An empty stop text, which every text holds, ends after one token.
    """
    own = model.generation_config.max_new_tokens
    return 1 if "" in until else asked if own is None else int(own)
