"""From a request to rows of the session: prompts as token ids, options by their own names.

OpenAI's defaults stand where a request is silent: temperature 1, 16 new tokens of a completion, and
of a chat as many as the context holds. Everything else follows the model's generation config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.engine.requests import SAMPLING, prompt_ids
from foretoken.engine.session import Session
from foretoken.errors import ConfigError, ContextError
from foretoken.sampling import SamplingParams
from foretoken.serve.wire.errors import Refusal, refusal_of
from foretoken.serve.wire.requests import (
    Asked,
    ChatRequest,
    CompletionRequest,
    Message,
    Part,
    Speculation,
    StructuredOutputs,
)
from foretoken.serve.wire.unsupported import check_reading, unsupported
from foretoken.types import DecodeState

COMPLETION_TOKENS = 16
AT_ONCE = 32  # texts of a prompt that are checked before the next look whether all is over
ROLES = {"developer": "system"}  # newer names of roles that templates know
ANY_OBJECT = {"json": {"type": "object"}}
# How another server's matcher is chosen and how it spaces JSON, which has one spelling here.
MATCHERS_OWN = ("disable_fallback", "disable_any_whitespace")
TOOL_FIELDS = ("tool_calls", "function_call", "audio")
SAME = (  # options of a session that are fields by the same name
    "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
    "ignore_eos", "priority",
)  # fmt: skip


def prompts_of(asked: Asked) -> list[Any]:
    """The prompts of a request as a session takes them: texts, ids, or one chat."""
    if isinstance(asked, ChatRequest):
        told = [message_of(one, number) for number, one in enumerate(asked.messages)]
        check_last(asked.messages[-1])
        return [told]
    assert isinstance(asked, CompletionRequest)
    prompt = asked.prompt
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def message_of(message: Message, number: int) -> dict[str, Any]:
    """A message of text, whatever it was made of, with the further fields that templates read."""
    extra = dict(message.model_extra or {})
    for name in TOOL_FIELDS:
        if extra.pop(name, None):
            raise unsupported(f"messages.{number}.{name}", "messages are made of text here")
    content = text_of(message.content, f"messages.{number}.content")
    further = {name: value for name, value in extra.items() if value is not None}
    return {**further, "role": ROLES.get(message.role, message.role), "content": content}


def check_last(message: Message) -> None:
    """Refuse a last message without a content, of which a text would say nothing any more; what
    else may be amiss with messages is said where they are read."""
    if message.content is not None and message.content != []:
        return
    raise Refusal(
        "the last message has no content.",
        "a last message is answered, or continued where it is the assistant's: it has a content, "
        "and one that is answered may have an empty one.",
        "write its content, or leave it out.",
        param="messages",
    )


def text_of(content: str | list[Part] | None, where: str) -> str:
    """A content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            what = "has no text" if part.type == "text" else f"is of type {part.type[:40]!r}"
            raise Refusal(
                f"a part of {where} {what}.",
                "contents are texts, or parts of type text with a text.",
                'write it as {"type": "text", "text": "..."}, or leave it out.',
                param=where,
                code="unsupported_parameter",
            )
    return "".join(part.text or "" for part in content)


def sampling_of(asked: Asked) -> dict[str, Any]:
    """The options of a session that a request asks for, but seeds and the number of tokens."""
    options = {name: getattr(asked, name) for name in SAME}
    options["temperature"] = 1.0 if asked.temperature is None else asked.temperature
    options["top_k"] = 0 if asked.top_k == -1 else asked.top_k  # -1: off, as other servers have it
    options["min_new_tokens"] = asked.min_tokens
    options["logit_bias"] = biases(asked.logit_bias)
    options["guesses"] = guesses_of(asked.speculation)
    options |= {"guided": guided_of(asked), "prediction": prediction_of(asked)}
    for name, field in (("guided", "response_format"), ("prediction", "prediction")):
        if options[name] is not None and name not in SAMPLING:
            raise unsupported(field, f"this version of the server has no option {name!r} yet")
    return {name: value for name, value in options.items() if value is not None}


def biases(asked: dict[str, float] | None) -> dict[int, float] | None:
    """OpenAI's logit_bias names token ids by texts, as JSON must."""
    if not asked:
        return None
    for token in asked:
        if not token.isascii() or not token.isdigit() or len(token) > 12:
            raise Refusal(
                f"logit_bias holds {token[:40]!r}.",
                'its keys are token ids, such as {"17": -2.5}.',
                "write ids as digits.",
                param="logit_bias",
            )
    return {int(token): bias for token, bias in asked.items()}


def guesses_of(speculation: bool | Speculation | None) -> int | None:
    """Most tokens guessed in a step; None: as many as pay."""
    if isinstance(speculation, Speculation):
        return speculation.max_tokens
    return 0 if speculation is False else None


def guided_of(asked: Asked) -> dict[str, Any] | None:
    """What the text has to look like: one of json (a schema), regex and choice."""
    form, outputs = asked.response_format, asked.structured_outputs
    named: dict[str, Any] = {
        "json": asked.guided_json, "regex": asked.guided_regex, "choice": asked.guided_choice,
    }  # fmt: skip
    found = [{name: value} for name, value in named.items() if value is not None]
    if outputs is not None:
        found += outputs_of(outputs)
    if form is not None and form.type == "json_object":
        found.append(ANY_OBJECT)
    if form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise Refusal(
                "response_format of type json_schema was passed without a schema.",
                'it is {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.',
                "pass the schema there.",
                param="response_format",
            )
        found.append({"json": form.json_schema.schema_})
    if len(found) > 1:
        raise Refusal(
            "several of response_format, structured_outputs, guided_json, guided_regex and "
            "guided_choice were passed, or several kinds in one of them.",
            "a text follows one of them.",
            "pass one.",
            param="response_format",
        )
    return found[0] if found else None


def outputs_of(outputs: StructuredOutputs) -> list[dict[str, Any]]:
    """What structured_outputs ask for, each by the name that it has here."""
    for name, value in (outputs.model_extra or {}).items():
        if name not in MATCHERS_OWN and value not in (None, False):
            raise unsupported(
                f"structured_outputs.{name[:40]}", "json, regex, choice and json_object are there"
            )
    named = {"json": outputs.json_, "regex": outputs.regex, "choice": outputs.choice}
    found: list[dict[str, Any]] = [{k: v} for k, v in named.items() if v is not None]
    return [*found, ANY_OBJECT] if outputs.json_object else found


def prediction_of(asked: Asked) -> str | None:
    """The text that is expected, to be guessed from."""
    if asked.prediction is None:
        return None
    return text_of(asked.prediction.content, "prediction.content") or None


def most_tokens(
    asked: Asked, prompt: int, longest: int | None, usual: int | None, limit: int | None
) -> int:
    """New tokens that a text may have: what was asked for, or the default of its kind.

    A chat that names no length may go on to the end of the context; where memory is bounded, for
    as long as several like it have a place beside each other: it would be written alone, and
    without guesses, if all that memory holds were kept for it.
    """
    wanted = asked.max_completion_tokens or asked.max_tokens
    if wanted is None and isinstance(asked, CompletionRequest):
        wanted = COMPLETION_TOKENS if limit is None else min(COMPLETION_TOKENS, limit)
    if wanted is None:
        least = SamplingParams().max_new_tokens
        room = least if longest is None else longest + 1 - prompt
        if usual is not None:
            room = min(room, max(usual - prompt, least))
        wanted = max(room if limit is None else min(room, limit), 1)
    if limit is not None and wanted > limit:
        raise Refusal(
            f"max_tokens={wanted} was asked for.",
            f"this server writes at most {limit} tokens per text.",
            f"pass {limit} or less.",
            param="max_tokens",
        )
    return wanted


def shorter(positions: int | None, held: int | None) -> int | None:
    """Positions of the longest text: those of the model, or fewer where memory holds fewer tokens.

    The last token of a text needs no position.
    """
    known = [one for one in (positions, None if held is None else held - 1) if one is not None]
    return min(known, default=None)


def rows_of(
    session: Session,
    asked: Asked,
    prompts: Sequence[Any],
    who: Mapping[str, str],
    limit: int | None,
    over: Callable[[], bool] = lambda: False,
) -> list[DecodeState]:
    """Checked rows, all texts of the first prompt first; fewer where it is `over` between two
    prompts, or many texts. Takes the tokenizer's time, and waits for the model where that is
    stepping: to be called in a thread that may wait."""
    target, tokenizer = session.target, session.tokenizer
    waiting = session.engine.waiting
    longest, usual = shorter(target.max_length, waiting.longest), waiting.usual
    options = {**sampling_of(asked), **who}
    if "guided" in options:  # read once for all texts
        options["guided"] = session.foretelling.grammar(options["guided"])
    if "prediction" in options:  # read once for all texts, as far as the longest of them can go
        options["prediction"] = session.foretelling.expected(options["prediction"], longest)
    rows: list[DecodeState] = []
    for number, prompt in enumerate(prompts):
        if over():
            break
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        try:
            ids = prompt_ids(prompt, tokenizer, target.vocab_size, target.max_length, which)
        except ContextError as error:
            raise too_long(error, asked, target.max_length) from error
        except ConfigError as error:
            raise refusal_of(error, field_of(asked)) from error
        check_reading(asked, getattr(tokenizer, "chat_template", None), len(ids))
        first = number * asked.texts
        seed = None if asked.seed == -1 else asked.seed  # -1: drawn, as other servers have it
        seeds = None if seed is None else [seed + first + i for i in range(asked.texts)]
        most = most_tokens(asked, len(ids), longest, usual, limit)
        for begin in range(0, asked.texts, AT_ONCE):
            if begin and over():
                return rows
            part = None if seeds is None else seeds[begin : begin + AT_ONCE]
            count = min(AT_ONCE, asked.texts - begin)
            rows += session.rows([ids] * count, most, seed=part, **options)
    return rows


def field_of(asked: Asked) -> str:
    """The field that holds what a text is written behind."""
    return "messages" if isinstance(asked, ChatRequest) else "prompt"


def too_long(error: ContextError, asked: Asked, longest: int) -> Refusal:
    """A prompt beyond the context, by the code and the words that clients look for."""
    return Refusal(
        error.asked,
        f"this model's maximum context length is {longest} tokens.",
        error.do,
        param=field_of(asked),
        code="context_length_exceeded",
    )
