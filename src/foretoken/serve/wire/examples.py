"""Requests that any server answers, for its description: one of each thing that can be asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ASKED: Mapping[str, Mapping[str, Any]] = {  # what both kinds of request may hold
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 1, "n": 2},
    "stream": {"stream": True, "stream_options": {"include_usage": True}},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": -100}},
    "stops": {"stop": [".", "\n"], "min_tokens": 2},
    "regular expression": {"guided_regex": "[a-z]{2,5}!"},
    "choice": {"guided_choice": ["yes", "no"]},
    "structured outputs": {"structured_outputs": {"choice": ["yes", "no"]}},
    "object": {"response_format": {"type": "json_object"}},
    "prediction": {"prediction": {"type": "content", "content": "once upon a time"}},
    "speculation": {"speculation": {"max_tokens": 3}, "include_speculation": True},
    "no speculation": {"speculation": False, "include_speculation": True},
    "other servers' names": {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1},
}
COMPLETIONS: Mapping[str, Mapping[str, Any]] = {
    "logarithms": {"logprobs": 2},
    "echo": {"echo": True},
    "several prompts": {"prompt": ["Once upon a time", "One, two,"]},
    "tokens": {"prompt": [[5, 6, 7]]},
}
CHATS: Mapping[str, Mapping[str, Any]] = {
    "logarithms": {"logprobs": True, "top_logprobs": 2},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "turns": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "How are you?"},
        ]
    },
}


def examples(
    base: Mapping[str, Any], kinds: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """By name, as OpenAPI holds them."""
    return {name: {"value": {**base, **more}} for name, more in {**ASKED, **kinds}.items()}


EXAMPLES: Mapping[str, dict[str, dict[str, Any]]] = {  # by path
    "/v1/completions": examples({"prompt": "Once upon a time", "max_tokens": 8}, COMPLETIONS),
    "/v1/chat/completions": examples(
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}, CHATS
    ),
}
