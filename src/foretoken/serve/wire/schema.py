"""The OpenAPI description of requests, which the endpoints read by themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from foretoken.serve.wire.requests import ChatRequest, CompletionRequest

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
REFUSED = (
    (400, "the request cannot be answered as it was asked"),
    (401, "no valid key was sent"),
    (404, "there is no such model"),
    (413, "the body is too large"),
    (429, "the queue is full"),
    (500, "a fault of the server"),
    (503, "the server is stopping"),
    (504, "the request took too long"),
)


def describe(api: FastAPI) -> None:
    """Let the application's schema say what its endpoints take and how they refuse."""
    own = api.openapi

    def described() -> dict[str, Any]:
        known = api.openapi_schema is not None
        schema = own()
        if not known:
            complete(schema)
        return schema

    api.openapi = described  # type: ignore[method-assign]


def complete(schema: dict[str, Any]) -> None:
    """Add the bodies of requests, and errors."""
    template = "#/components/schemas/{model}"
    kinds = [(kind, "validation") for kind in BODIES.values()]
    _, found = models_json_schema(kinds, ref_template=template)  # type: ignore[arg-type]
    parts = schema.setdefault("components", {}).setdefault("schemas", {})
    parts.update({**found.get("$defs", {}), "Error": ERROR})
    error = {"application/json": {"schema": {"$ref": template.format(model="Error")}}}
    for path, kind in BODIES.items():
        ref = {"$ref": template.format(model=kind.__name__)}
        call = schema["paths"][path]["post"]
        call["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref}}}
        events = {"schema": {"type": "string"}}
        call["responses"]["200"]["content"]["text/event-stream"] = events
        for status, words in REFUSED:
            call["responses"][str(status)] = {"description": words, "content": error}
    for path, call in schema["paths"].items():
        for one in call.values():
            told = one["responses"]
            told.pop("422", None)
            told.setdefault("404", {"description": "not found", "content": error})
            if path.startswith("/v1/"):
                told["401"] = {"description": dict(REFUSED)[401], "content": error}
    health = schema["paths"]["/health"]["get"]["responses"]
    health["503"] = {**health["200"], "description": "the server takes no requests"}
