"""A conversation as a prompt: messages through the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.engine.text import check_text
from foretoken.errors import ConfigError

Message = Mapping[str, Any]  # {"role": "user", "content": ...}, as in transformers
MOST_TOLD = 400  # characters of roles, and of what a template says
EXAMPLE = '[{"role": "user", "content": "Hello"}]'
PROBE = "is7this8read"  # which no template says of its own
IN_PARTS: dict[str, bool] = {}  # whether a template reads contents as parts, by its text


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages, not a text, token ids or a batch of these."""
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return listed and any(isinstance(one, Mapping) for one in prompt)


def chat_ids(messages: Any, tokenizer: Any, which: str = "the prompt") -> list[int]:
    """The token ids after which a model answers these messages.

    A last message of the assistant's own is continued. `messages` is checked here, roles and
    their order by the template.
    """
    last = len(check_chat(messages)) - 1
    checked = [_message(one, number, number == last) for number, one in enumerate(messages)]
    if not getattr(tokenizer, "chat_template", None):
        missing = "no tokenizer" if tokenizer is None else "a tokenizer without a chat template"
        raise ConfigError(
            f"{which} is a list of {len(checked)} chat messages.",
            f"there is {missing}, so nothing says how this model reads messages.",
            "pass one text as the model was trained to read it, or load with tokenizer= that has "
            "a chat template.",
        )
    for number, message in enumerate(checked):
        check_text(message["content"], f"message {number}")
    if reads_parts(tokenizer):
        checked = [{**one, "content": in_parts(one["content"])} for one in checked]
    own = checked[-1]["role"] == "assistant"
    try:
        found = tokenizer.apply_chat_template(
            checked,
            add_generation_prompt=not own,
            continue_final_message=own,
            tokenize=True,
            return_dict=True,
        )
    except refusals() as error:
        roles = ", ".join(message["role"] for message in checked)
        told = roles if len(roles) <= MOST_TOLD else f"{roles[:MOST_TOLD]} ..."
        raise ConfigError(
            f"chat messages of the roles {told} were passed as a prompt.",
            f"the chat template of this model refuses them: {str(error)[:MOST_TOLD]}.",
            "pass the roles in an order that this model knows, most often user and assistant in "
            "turns after at most one system message.",
        ) from error
    return [int(token) for token in found["input_ids"]]


def in_parts(text: str) -> list[dict[str, str]]:
    """A content as one part of text."""
    return [{"type": "text", "text": text}]


def reads_parts(tokenizer: Any) -> bool:
    """Whether the chat template of a tokenizer reads contents as parts, and not as texts.

    Such a template goes through a text letter by letter, and finds no part in it: it says nothing.
    """
    template = str(tokenizer.chat_template)
    if template not in IN_PARTS:
        parts = keeps(tokenizer, PROBE) is False  # None: refused, as the caller's own may not be
        if parts and not keeps(tokenizer, in_parts(PROBE)):
            raise ConfigError(
                "chat messages were passed as a prompt.",
                "the chat template of this model leaves out what a user says, written as a text or "
                "in parts.",
                "pass one text as the model was trained to read it, or set a chat_template of the "
                "tokenizer that has the contents of messages.",
            )
        IN_PARTS[template] = parts
    return IN_PARTS[template]


def keeps(tokenizer: Any, content: Any) -> bool | None:
    """Whether a template says what is in a content of this form; None where it refuses it."""
    message = {"role": "user", "content": content}
    try:
        said: str = tokenizer.apply_chat_template([message], tokenize=False)
    except refusals():
        return None
    return PROBE in said.lower()  # it may be capitalized


def refusals() -> tuple[type[Exception], ...]:
    """What a template raises for messages that it does not read, or fields of other types."""
    from jinja2 import TemplateError

    return TemplateError, ValueError, TypeError, AttributeError, LookupError


def check_chat(messages: Any) -> Sequence[Any]:
    """A non-empty list of messages, or a refusal."""
    if is_chat(messages):
        return messages  # type: ignore[no-any-return]
    raise ConfigError(
        f"a {type(messages).__name__} was passed as chat messages."
        if messages
        else "a chat without messages was passed.",
        "a chat is a list of at least one message, each with a role and a content.",
        f"pass for example {EXAMPLE}.",
    )


def as_text(content: Any, number: int) -> str | None:
    """A content as one text, which may be in parts, all of text; None where there is none."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ConfigError(
            f"message {number} of a chat has a content of type {type(content).__name__}.",
            "a content is a text, or a list of parts of text.",
            f"write it as in {EXAMPLE}, a part with a list around it.",
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(
                f"message {number} of a chat has a part of type {str(kind)[:MOST_TOLD]!r}.",
                "a session reads text: its target is not shown pictures or sounds.",
                'leave the part out, or write {"type": "text", "text": ...}.',
            )
        texts.append(part["text"])
    return "".join(texts)


def _message(one: Any, number: int, last: bool) -> dict[str, Any]:
    """A message with a role and a content, or a refusal that names it.

    A content may be empty, as that of a system prompt or the result of a tool; only an answer that
    is to be continued has to have begun.
    """
    if isinstance(one, Mapping) and isinstance(one.get("role"), str):
        content = as_text(one.get("content"), number)
        if last and content == "" and one["role"] == "assistant":
            raise ConfigError(
                f"message {number} of a chat, the last one, is an empty one of the assistant's.",
                "a last message of the assistant's is continued, and this one has not begun.",
                "leave it out, and the message before it is answered; or write how it begins.",
            )
        if content is not None:
            return {**one, "content": content}
    keys = ", ".join(map(str, one)) if isinstance(one, Mapping) else type(one).__name__
    keys = keys[:MOST_TOLD]
    raise ConfigError(
        f"message {number} of a chat has the fields {keys or 'none'}, and no role or no content.",
        "a message has a role (a text such as user) and a content.",
        f"write it as in {EXAMPLE}.",
    )
