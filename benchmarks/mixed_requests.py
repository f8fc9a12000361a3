"""Requests of every kind to an OpenAI-compatible server, and what each of them gives alone.

A request is made of a prompt and a draw of options; `alone` asks a session for its texts one after
another, in words of the session and not of the server, so that a server can be held against it.
A seed repeats a sampled text where lengths of drafts do not follow measured costs, or follow the
same costs: in one session.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from foretoken.engine.session import Session
from foretoken.errors import ForetokenError

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SYSTEM = "You answer briefly, in one plain sentence, and you say so where you do not know. "
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tall": {"type": "boolean"},
    },
    "required": ["name", "age", "tall"],
    "additionalProperties": False,
}
REGEX, CHOICE = "[a-c]{2,5} and then [0-9]{1,3}!", ["the first of them", "the second", "neither"]
GRAMMARS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (  # for the server, for the session
    ({"guided_json": PERSON}, {"json": PERSON}),
    ({"guided_regex": REGEX}, {"regex": REGEX}),
    ({"guided_choice": CHOICE}, {"choice": CHOICE}),
    ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
        {"json": PERSON},
    ),
)
SAME = (  # options of a session that are fields by the same name
    "temperature", "top_p", "top_k", "min_p", "stop", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """One text of an answer."""

    text: str
    finish: str


@dataclass(frozen=True, slots=True)
class Told:
    """What an answer says: its texts in order, or a refusal; counts where they were told."""

    texts: tuple[Text, ...] = ()
    tokens: int | None = None  # of all texts
    listed: int | None = None  # tokens whose logarithms were told
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A body for the server, with the same for a session."""

    path: str
    body: Mapping[str, Any]
    guided: Mapping[str, Any] | None = None  # in words of the session
    family: str = ""

    @property
    def texts(self) -> int:
        return int(self.body.get("n", 1))


def options(dice: random.Random, prompt: str, answer: str, most: int) -> list[dict[str, Any]]:
    """Fields of which a request has some; each is drawn whole."""
    end = prompt.split()[-1] if prompt.split() else "a"
    return [
        {"top_p": dice.choice((0.5, 0.9, 1.0))}, {"top_k": dice.choice((1, 5, 40, -1))},
        {"min_p": 0.05}, {"stop": [dice.choice((".", "\n", " the", "e"))]}, {"stop": ["in", end]},
        {"frequency_penalty": dice.choice((-0.5, 0.7))}, {"presence_penalty": 0.6},
        {"repetition_penalty": 1.2}, {"logit_bias": {"70": 3.0, "42": -100.0}},
        {"min_tokens": min(4, most)}, {"ignore_eos": True}, {"logprobs": dice.choice((0, 2, 5))},
        {"n": dice.choice((2, 3))}, {"echo": True}, {"speculation": False},
        {"speculation": {"max_tokens": dice.choice((1, 2, 6))}}, {"include_speculation": True},
        {"prediction": {"type": "content", "content": answer}},
        {"prediction": {"type": "content", "content": "something else, which is not written"}},
        {"user": dice.choice("abc")}, {"priority": dice.choice((-1, 0, 3))},
        {"stream_options": {"include_usage": True}},
    ]  # fmt: skip


def made(
    dice: random.Random, family: str, prompt: str, answer: str, most: Sequence[int], chats: bool,
    guided: float, without: Sequence[str],
) -> Request:  # fmt: skip
    """One request of a prompt: greedy or sampled with a seed, whole or a stream."""
    cap = dice.choice(most)
    body: dict[str, Any] = {
        "max_tokens": cap,
        "temperature": dice.choice((0.0, 0.0, 0.7, 1.0)),
        "seed": dice.randrange(1000),
        "stream": dice.random() < 0.5,
    }
    for more in dice.sample(options(dice, prompt, answer, cap), dice.choice((0, 1, 1, 2, 3))):
        body |= more
    rule = None
    if dice.random() < guided:
        fields, rule = dice.choice(GRAMMARS)
        body |= fields
        body["max_tokens"] = max(cap, 32)
    path = CHATS if chats and dice.random() < 0.4 else COMPLETIONS
    if path == CHATS:
        content = prompt if dice.random() < 0.5 else [{"type": "text", "text": prompt}]
        system = [{"role": "system", "content": SYSTEM}] if dice.random() < 0.5 else []
        body["messages"] = [*system, {"role": "user", "content": content}]
        body.pop("echo", None)
        if "logprobs" in body:
            body |= {"top_logprobs": body["logprobs"], "logprobs": True}
    else:
        body["prompt"] = SYSTEM + prompt if dice.random() < 0.2 else prompt
        if "logprobs" in body:  # logarithms are told of new tokens only
            body.pop("echo", None)
    for name in without:
        body.pop(name, None)
    return Request(path, body, None if "guided" in without else rule, family)


def mixed(
    count: int,
    seed: int,
    prompts: Sequence[tuple[str, str, str]],
    *,
    most: Sequence[int] = (1, 5, 12, 24),
    chats: bool = True,
    guided: float = 0.12,
    without: Sequence[str] = (),
) -> list[Request]:
    """So many requests of (family, prompt, a likely answer); the same for the same arguments."""
    dice = random.Random(seed)
    return [made(dice, *dice.choice(prompts), most, chats, guided, without) for _ in range(count)]


def spoken(request: Request) -> tuple[Any, dict[str, Any]]:
    """The prompt and the options of a request, as a session takes them, but for the seed."""
    body = request.body
    given = {name: body[name] for name in SAME if name in body}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if "logit_bias" in body:
        given["logit_bias"] = {int(token): bias for token, bias in body["logit_bias"].items()}
    if "min_tokens" in body:
        given["min_new_tokens"] = body["min_tokens"]
    if "speculation" in body:
        asked = body["speculation"]
        given["guesses"] = asked["max_tokens"] if asked else 0
    if "prediction" in body:
        given["prediction"] = body["prediction"]["content"]
    if request.guided is not None:
        given["guided"] = dict(request.guided)
    if request.path == COMPLETIONS:
        return body["prompt"], given
    return [{**one, "content": joined(one["content"])} for one in body["messages"]], given


def joined(content: str | Sequence[Mapping[str, str]]) -> str:
    """A message's content as one text."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def alone(session: Session, request: Request) -> Told:
    """What the session writes for the request when there is no other, text by text."""
    prompt, given = spoken(request)
    body = request.body
    found, tokens, ends = [], 0, 0
    for number in range(request.texts):
        try:
            [one] = session.generate_rows(
                [prompt], body["max_tokens"], seed=body["seed"] + number, **given
            )
        except ForetokenError:
            return Told(refused=True)
        before = prompt if body.get("echo") else ""
        found.append(Text(before + one.text, "stop" if one.finish_reason == "stop" else "length"))
        tokens += len(one.tokens)
        ends += one.tokens[-1] in session.eos and not body.get("ignore_eos")
    # Logarithms are told of what is in the text: of no end token, and of nothing behind a stop.
    whole = "stop" not in body and body.get("logprobs") not in (None, False)
    return Told(tuple(found), tokens, tokens - ends if whole else None)


def read(request: Request, status: int, said: str) -> Told:
    """What a whole response says; ValueError for one that is none."""
    if status == 400:
        return Told(refused=True)
    if status != 200:
        raise ValueError(f"status {status}: {said[:200]}")
    if not request.body["stream"]:
        return read_document(json.loads(said))
    events = [line[6:] for line in said.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise ValueError(f"a stream ended without [DONE], after {events[-1:]}")
    return read_events([json.loads(one) for one in events[:-1]], request.texts)


def read_document(document: Mapping[str, Any]) -> Told:
    """An answer that came at once."""
    choices = sorted(document["choices"], key=lambda one: one["index"])
    listed = [listing(one) for one in choices if one["logprobs"] is not None]
    return Told(
        tuple(Text(words(one, "message"), one["finish_reason"]) for one in choices),
        document["usage"]["completion_tokens"],
        sum(listed) if listed else None,
    )


def read_events(chunks: Sequence[Mapping[str, Any]], count: int) -> Told:
    """An answer that came in pieces."""
    texts, ends, listed = [""] * count, [""] * count, None
    tokens = None
    for chunk in chunks:
        if "error" in chunk:
            raise ValueError(f"a stream ended by {chunk['error']}")
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
        for one in chunk["choices"]:
            texts[one["index"]] += words(one, "delta")
            ends[one["index"]] += one["finish_reason"] or ""
            if one["logprobs"] is not None:
                listed = (listed or 0) + listing(one)
    return Told(tuple(map(Text, texts, ends)), tokens, listed)


def words(choice: Mapping[str, Any], name: str) -> str:
    """The words of a choice: of a completion, or of a chat by the name that they have there."""
    return choice["text"] if "text" in choice else choice[name].get("content") or ""


def listing(choice: Mapping[str, Any]) -> int:
    """Tokens whose logarithms a choice tells."""
    logs = choice["logprobs"]
    return len(logs["tokens"] if "tokens" in logs else logs["content"])


def agrees(request: Request, wanted: Told, told: Told) -> bool:
    """Whether an answer is what it should be, in all that its request asks for.

    A count that was asked for and is not there is as wrong as another one; of no token at all no
    logarithms need to be told.
    """
    if wanted.refused or told.refused:
        return wanted.refused == told.refused
    if wanted.listed is not None and wanted.listed != (told.listed or 0):
        return False
    counted = told.tokens is not None and told.tokens == wanted.tokens
    unasked = told.tokens is None or wanted.tokens is None
    return wanted.texts == told.texts and (counted or (unasked and not counts(request)))


def counts(request: Request) -> bool:
    """Whether the answer has to say how many tokens were written."""
    asked = request.body.get("stream_options") or {}
    return not request.body["stream"] or bool(asked.get("include_usage"))


async def ask(client: httpx.AsyncClient, request: Request) -> Told:
    """Send a request and read its answer to the end."""
    response = await client.post(request.path, json=dict(request.body))
    return read(request, response.status_code, response.text)
