"""What whole answers look like, for the OpenAPI description: closed, so that a slip shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NOTHING: Schema = {"type": "null"}
LOGPROB: Schema = {"type": "number", "maximum": 0}
BYTES: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}}


def closed(fields: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of these fields, all of them there but the optional ones, and no others."""
    return {
        "type": "object",
        "required": list(fields),
        "properties": {**fields, **(optional or {})},
        "additionalProperties": False,
    }


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NOTHING]}


def one_of(*words: str) -> Schema:
    return {"enum": list(words)}


USAGE = closed(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": closed({"cached_tokens": COUNT}),
        "completion_tokens_details": closed(
            {"accepted_prediction_tokens": COUNT, "rejected_prediction_tokens": COUNT}
        ),
    }
)
TOKEN = {"token": TEXT, "logprob": LOGPROB, "bytes": BYTES}
COMPLETION_LOGS = closed(
    {
        "tokens": listed(TEXT),
        "token_logprobs": listed(LOGPROB),
        "top_logprobs": listed(or_null({"type": "object", "additionalProperties": LOGPROB})),
        "text_offset": listed(COUNT),
    }
)
CHAT_LOGS = closed(
    {
        "content": listed(closed({**TOKEN, "top_logprobs": listed(closed(TOKEN))})),
        "refusal": NOTHING,
    }
)
MESSAGE = closed({"role": one_of("assistant"), "content": TEXT, "refusal": NOTHING})


def answer(kind: str, words: Mapping[str, Schema], logs: Schema) -> Schema:
    """A document of texts; what `foretoken` holds is told in docs/serving.md."""
    ends = {"logprobs": or_null(logs), "finish_reason": one_of("stop", "length")}
    choice = closed({"index": COUNT, **words, **ends})
    fields = {
        "id": TEXT, "object": one_of(kind), "created": COUNT, "model": TEXT,
        "system_fingerprint": TEXT, "choices": {**listed(choice), "minItems": 1}, "usage": USAGE,
    }  # fmt: skip
    return closed(fields, {"foretoken": {"type": "object"}})


MODEL = closed(
    {
        "id": TEXT, "object": one_of("model"), "created": COUNT, "owned_by": TEXT,
        "max_model_len": or_null(COUNT), "foretoken": {"type": "object"},
    }
)  # fmt: skip
ANSWERS: Mapping[str, tuple[str, Schema]] = {  # by path: a name, and the answer of status 200
    "/v1/completions": ("Completion", answer("text_completion", {"text": TEXT}, COMPLETION_LOGS)),
    "/v1/chat/completions": (
        "ChatCompletion",
        answer("chat.completion", {"message": MESSAGE}, CHAT_LOGS),
    ),
    "/v1/models": ("Models", closed({"object": one_of("list"), "data": listed(MODEL)})),
    "/v1/models/{name}": ("Model", MODEL),
    "/health": ("Health", closed({"status": one_of("ok", "stopping", "down")})),
}
