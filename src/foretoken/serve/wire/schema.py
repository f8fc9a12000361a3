"""The OpenAPI description: what endpoints take and answer, whose bodies FastAPI does not see."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from foretoken.serve.wire.answer_schemas import ANSWERS
from foretoken.serve.wire.examples import EXAMPLES
from foretoken.serve.wire.requests import ChatRequest, CompletionRequest

TEMPLATE = "#/components/schemas/{model}"
BODIES = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
EVENT = {  # of a stream; its data is a chunk as JSON, or [DONE]
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}
REFUSED = (
    (400, "the request cannot be answered as it was asked"),
    (401, "no valid key was sent"),
    (404, "there is no such model"),
    (408, "the body did not come in time"),
    (413, "the body is too large"),
    (429, "the queue is full"),
    (500, "a fault of the server"),
    (503, "the server is stopping"),
    (504, "the request took too long"),
)


def describe(api: FastAPI, model: str, guarded: str | None = None) -> None:
    """Let the application's schema say what its endpoints take, answer and how they refuse.

    Requests may name `model` alone; paths that begin with `guarded` need a key.
    """
    own = api.openapi

    def described() -> dict[str, Any]:
        schema = own()  # made anew where a route was added since
        if any("requestBody" not in schema["paths"][path]["post"] for path in BODIES):
            complete(schema, model, guarded)
        return schema

    api.openapi = described  # type: ignore[method-assign]


def complete(schema: dict[str, Any], model: str, guarded: str | None) -> None:
    """Add the bodies of requests and of answers, errors, and keys.

    Paths that somebody else added to the application, and their schemas, stay as they are.
    """
    kinds = [(kind, "validation") for kind in BODIES.values()]
    _, found = models_json_schema(kinds, ref_template=TEMPLATE)  # type: ignore[arg-type]
    answers = dict(ANSWERS.values())
    parts = {**found.get("$defs", {}), **answers, "Error": ERROR}
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {}).update(parts)
    for path, kind in BODIES.items():
        parts[kind.__name__]["properties"]["model"] = {"enum": [model, None], "default": None}
        call = schema["paths"][path]["post"]
        content = named(kind.__name__)
        content["application/json"]["examples"] = EXAMPLES[path]
        call["requestBody"] = {"required": True, "content": content}
        for status, words in REFUSED:
            call["responses"][str(status)] = refused(words)
    for path, (name, _) in ANSWERS.items():
        call = schema["paths"][path]["post" if path in BODIES else "get"]
        told = call["responses"]
        told.pop("422", None)
        told["200"]["content"] = named(name)
        told.setdefault("404", refused("not found"))
        if path.startswith("/v1/"):
            told["401"] = refused(dict(REFUSED)[401])
        if guarded is not None and path.startswith(guarded):
            call["security"] = [{"key": []}]
        for one in call.get("parameters", ()):
            if one["name"] == "name":
                one["examples"] = {"the model": {"value": model}}
    for path in BODIES:
        events = {"text/event-stream": {"schema": EVENT}}
        schema["paths"][path]["post"]["responses"]["200"]["content"] |= events
    health = schema["paths"]["/health"]["get"]["responses"]
    health["503"] = {**health["200"], "description": "the server takes no requests"}
    if guarded is not None:
        keys = components.setdefault("securitySchemes", {})
        keys["key"] = {"type": "http", "scheme": "bearer"}


def named(name: str) -> dict[str, Any]:
    """A JSON document of a schema among the components."""
    return {"application/json": {"schema": {"$ref": TEMPLATE.format(model=name)}}}


def refused(words: str) -> dict[str, Any]:
    """A response that is an error."""
    return {"description": words, "content": named("Error")}
