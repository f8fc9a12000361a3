"""Fields that are refused: those that ask for what cannot be done here, and misspelled ones.

Any other unknown field is ignored, as clients send new ones that a server need not know.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from foretoken.serve.wire.errors import Refusal
from foretoken.serve.wire.requests import Asked, ChatRequest, CompletionRequest

ALIKE = 0.85  # of names: a field that is so near to one of ours was meant to be it
LOOKED_AT = 32  # unknown names of a request that are compared with ours; nobody means more


def unless(*harmless: Any) -> Callable[[Any], bool]:
    """Whether a value asks for something, beside nothing and these. Zero is no False: other
    servers tell the one token that was chosen where `prompt_logprobs` is 0."""
    return lambda value: not (value is None or value is False or value in ([], {}, *harmless))


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
    "use_beam_search": (unless(0), "one text is written at a time, by greedy choice or sampling"),
    "prompt_logprobs": (unless(), "the tokens of a prompt are not told"),
    "logprob_token_ids": (unless(), "logarithms are told of the likeliest tokens"),
    "return_token_ids": (unless(0), "answers are texts, and tell no token ids"),
    "return_tokens_as_token_ids": (unless(0), "tokens are told by their texts"),
    "allowed_token_ids": (unless(), "guided_regex and guided_choice say what may be written"),
    "bad_words": (unless(), "logit_bias forbids tokens here"),
    "skip_special_tokens": (lambda value: value is False, "texts have no special tokens here"),
    "cache_salt": (unless(""), "kept prefixes are told apart by API keys"),
}
REFUSED_IN_CHATS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "chat_template": (unless(""), "messages are read by the model's own template"),
    "echo": (unless(0), "an answer begins behind its messages; /v1/completions has echo"),
}
REFUSED_IN_COMPLETIONS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "top_logprobs": (unless(0), "a completion takes their number as logprobs"),
}
IGNORED = frozenset(
    "store metadata service_tier parallel_tool_calls safety_identifier prompt_cache_key "
    "prompt_cache_retention verbosity reasoning_effort documents logprobs top_logprobs best_of "
    "length_penalty spaces_between_special_tokens add_special_tokens "
    "add_generation_prompt continue_final_message chat_template chat_template_kwargs "
    "truncate_prompt_tokens include_stop_str_in_output".split()
)
# what templates that know it do unless they are told otherwise
USUAL = {"enable_thinking": True, "reasoning_effort": "medium"}
# fields that other servers hand to the template, and whether they ask for something
VARIABLES = {"reasoning_effort": unless(""), "documents": unless()}
NOT_TOLD = "the model's template is given nothing but messages"


def check_fields(asked: Asked) -> None:
    """Refuse a request whose further fields cannot be ignored."""
    known = set(type(asked).model_fields)
    # A name that is so much longer than any of ours is like none of them.
    longest = max(map(len, known)) * (2 / ALIKE - 1)
    chat = isinstance(asked, ChatRequest)
    refused = {**REFUSED, **(REFUSED_IN_CHATS if chat else REFUSED_IN_COMPLETIONS)}
    reading, looked_at = reading_of(asked), 0
    for name, value in (asked.model_extra or {}).items():
        if name in refused:
            asks, why = refused[name]
            if asks(value):
                raise unsupported(name, why)
        elif name in reading:
            done, why = reading[name]
            if value not in (None, done):
                raise unsupported(name, why)
        elif name == "best_of":
            if value not in (None, asked.texts):
                raise unsupported(name, "all n texts are returned, and none is chosen of more")
        elif name == "include_stop_str_in_output" and value and asked.stop:
            raise unsupported(name, "texts end before their stop")
        elif name not in IGNORED and value is not None and looked_at < LOOKED_AT:
            if len(name) <= longest:
                check_spelling(name, known)
            looked_at += 1


def check_reading(asked: Asked, template: Any, tokens: int) -> None:
    """Refuse what would have a prompt of so many tokens read in another way: variables that the
    chat template knows, or a cut."""
    extra = asked.model_extra or {}
    if isinstance(asked, ChatRequest):
        check_variables(extra, words_of(str(template)))
    most = extra.get("truncate_prompt_tokens")
    if isinstance(most, int) and 0 <= most < tokens:
        raise unsupported("truncate_prompt_tokens", "prompts are read whole")


def check_variables(extra: Mapping[str, Any], words: frozenset[str]) -> None:
    """Refuse variables that a template of these words reads, but what they are without a wish."""
    told = extra.get("chat_template_kwargs")
    for name, value in (told if isinstance(told, dict) else {}).items():
        if name in words and USUAL.get(name) != value:
            raise unsupported(f"chat_template_kwargs.{name[:40]}", NOT_TOLD)
    for name, asks in VARIABLES.items():
        value = extra.get(name)
        if name in words and asks(value) and USUAL.get(name) != value:
            raise unsupported(name, NOT_TOLD)
    if extra.get("reasoning_effort") == "none" and "enable_thinking" in words:
        raise unsupported("reasoning_effort", NOT_TOLD)


@lru_cache(maxsize=8)
def words_of(template: str) -> frozenset[str]:
    """All words of a chat template, found once: a request may name hundreds of thousands."""
    return frozenset(re.findall(r"\w+", template))


def reading_of(asked: Asked) -> dict[str, tuple[bool, str]]:
    """How a prompt is read here, by the fields in which clients of other servers choose that: the
    one value that is answered, and why."""
    if isinstance(asked, ChatRequest):
        goes_on = asked.messages[-1].role == "assistant"
        why = "a last message of the assistant's is continued, and any other one is answered"
        return {
            "add_special_tokens": (False, "a chat has those that its template writes"),
            "add_generation_prompt": (not goes_on, why),
            "continue_final_message": (goes_on, why),
        }
    assert isinstance(asked, CompletionRequest)
    first = asked.prompt[0] if isinstance(asked.prompt, list) and asked.prompt else asked.prompt
    if not isinstance(first, str):
        return {}  # of token ids nothing is left to be chosen
    return {"add_special_tokens": (True, "texts are read with the tokenizer's special tokens")}


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
