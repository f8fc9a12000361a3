"""The first words with a server: which model it has, whether it counts tokens, warm-up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

import httpx

from foretoken.bench.load.client import Client
from foretoken.bench.load.events import clipped
from foretoken.bench.load.prompts import Prompts, Writing
from foretoken.bench.load.record import Record
from foretoken.errors import ConfigError

REFUSED = ("http 400", "http 422")  # how servers answer fields that they do not know


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What is known of a server before anything is measured."""

    model: str
    usage: bool  # it may be asked for its own count of tokens in a stream
    counts: bool  # and tells it


async def meet(
    client: Client, writing: Writing, prompts: Prompts, model: str | None, warm: int
) -> Met:
    """The model to ask for, and a few requests that are not measured.

    A server that refuses `stream_options` is asked without: tokens are then counted pieces, which
    the reports say.
    """
    name = model or await model_of(client)
    usage = writing.stream
    first = await warmed(client, writing, prompts, name, usage, range(1))
    if first.error in REFUSED and usage and "stream_options" in (first.detail or ""):
        usage = False
        first = await warmed(client, writing, prompts, name, usage, range(1))
    if first.error is not None:
        raise ConfigError(
            f"a request for {name} to {client.server.url}/{writing.path}.",
            f"the server does not answer it ({first.error}: {first.detail}).",
            "see that the server is up and takes such requests; --model, --endpoint, --api-key and "
            "--timeout are passed on to it.",
        )
    await warmed(client, writing, prompts, name, usage, range(1, warm))
    return Met(model=name, usage=usage, counts=not first.counted)


async def warmed(
    client: Client,
    writing: Writing,
    prompts: Prompts,
    model: str,
    usage: bool,
    numbers: Iterable[int],
) -> Record:
    """Requests one after the other; the last one's record.

    Their prompts are from the other end of the list, so that none is in the server's cache when it
    is measured.
    """
    record = Record(number=0, prompt="", family="", due=0.0)
    for number in numbers:
        task = prompts.spare(number)
        record = Record(number=number, prompt=task.id, family=task.family, due=0.0)
        body = writing.body(task, number, model, usage)
        await client.ask(record, writing.path, body, perf_counter())
    return record


async def model_of(client: Client) -> str:
    """The name of the first model that a server lists."""
    url = f"{client.server.url}/models"
    try:
        answer = await client.get("models")
    except httpx.RequestError as problem:
        raise ConfigError(
            f"a load test of {client.server.name}.",
            f"no server answers at {url} ({clipped(str(problem)) or type(problem).__name__}).",
            "start the server, or pass the address it listens on.",
        ) from problem
    try:
        if answer.status_code == 200:
            return str(answer.json()["data"][0]["id"])
    except (json.JSONDecodeError, KeyError, IndexError, TypeError):
        pass
    raise ConfigError(
        f"the models of {client.server.name}.",
        f"{url} does not list any (http {answer.status_code}: {clipped(answer.content)}).",
        "pass --model NAME, and --api-key if the server wants one.",
    )
