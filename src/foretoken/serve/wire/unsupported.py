"""Fields that are refused: those that ask for what cannot be done here, and misspelled ones.

Any other unknown field is ignored, as clients send new ones that a server need not know.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from foretoken.serve.wire.errors import Refusal
from foretoken.serve.wire.requests import Asked

ALIKE = 0.85  # of names: a field that is so near to one of ours was meant to be it


def unless(*harmless: Any) -> Callable[[Any], bool]:
    """Whether a value asks for something, beside nothing and these."""
    return lambda value: value not in (None, False, [], {}, *harmless)


REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "tools": (unless(), "the model is not told of tools"),
    "tool_choice": (unless("none", "auto"), "the model is not told of tools"),
    "functions": (unless(), "the model is not told of functions"),
    "function_call": (unless("none", "auto"), "the model is not told of functions"),
    "audio": (unless(), "texts are written, and no sound"),
    "modalities": (unless(["text"]), "texts are written, and nothing else"),
    "web_search_options": (unless(), "nothing is searched"),
    "suffix": (unless(""), "texts are continued, and not filled in"),
    "guided_grammar": (unless(), "guided_json, guided_regex and guided_choice are there"),
    "stop_token_ids": (unless(), "a stop is a text here"),
    "use_beam_search": (unless(), "one text is written at a time, by greedy choice or sampling"),
    "prompt_logprobs": (unless(), "the tokens of a prompt are not told"),
}
IGNORED = frozenset(
    "store metadata service_tier parallel_tool_calls safety_identifier prompt_cache_key "
    "prompt_cache_retention verbosity reasoning_effort logprobs top_logprobs best_of "
    "length_penalty skip_special_tokens spaces_between_special_tokens".split()
)


def check_fields(asked: Asked) -> None:
    """Refuse a request whose further fields cannot be ignored."""
    known = set(type(asked).model_fields)
    for name, value in (asked.model_extra or {}).items():
        if name in REFUSED:
            asks, why = REFUSED[name]
            if asks(value):
                raise unsupported(name, why)
        elif name == "best_of":
            if value not in (None, asked.texts):
                raise unsupported(name, "all n texts are returned, and none is chosen of more")
        elif name not in IGNORED and value is not None:
            check_spelling(name, known)


def check_spelling(name: str, known: set[str]) -> None:
    """An option with a slip in its name would be ignored in silence."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)
    if near:
        raise Refusal(
            f"the field {name!r} was passed.",
            f"there is no such field, and it is nearly {near[0]!r}.",
            f"write {near[0]}, or leave it out.",
            param=name,
            code="unknown_parameter",
        )


def unsupported(name: str, why: str) -> Refusal:
    return Refusal(
        f"{name} was asked for.",
        f"{why}.",
        f"leave {name} out.",
        param=name,
        code="unsupported_parameter",
    )
