"""Pages for people: the chat at /, and /docs, without anything from elsewhere."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

PAGE = Path(__file__).parent / "page" / "index.html"
READ = ["GET", "HEAD"]  # methods of what is only looked at


def add_pages(api: FastAPI) -> None:
    """The chat where it ships, and the docs."""

    @api.api_route("/", methods=READ, include_in_schema=False)
    async def home() -> Response:
        if PAGE.is_file():
            return FileResponse(PAGE, media_type="text/html; charset=utf-8")
        return RedirectResponse("docs")

    @api.api_route("/docs", methods=READ, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_of(api.openapi()))


def docs_of(schema: dict[str, Any]) -> str:
    """All endpoints and the fields they take, as one page."""
    parts = []
    for path, calls in schema["paths"].items():
        for method, call in calls.items():
            title = f"{method.upper()} {path}"
            parts.append(f"<h2><code>{escape(title)}</code></h2><p>{escape(call['summary'])}</p>")
            content = call.get("requestBody", {}).get("content", {})
            for kind in content.values():
                name = kind["schema"].get("$ref", "").rpartition("/")[2]  # none: no model
                parts.append(fields_of(schema["components"]["schemas"].get(name, {})))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>foretoken</title>'
        '<meta name="viewport" content="width=device-width">'
        "<style>body{font:16px/1.5 sans-serif;max-width:50em;margin:2em auto;padding:0 1em;"
        "color-scheme:light dark}dt{font-family:monospace}</style>"
        "<h1>foretoken</h1><p>An OpenAI-compatible server. "
        '<a href="openapi.json">openapi.json</a> says it all for programs.</p>'
        + "".join(parts)
        + "</html>"
    )


def fields_of(schema: dict[str, Any]) -> str:
    """The fields of a request."""
    needed = set(schema.get("required", ()))
    rows = [
        f"<dt>{escape(name)}{' (required)' if name in needed else ''}</dt>"
        f"<dd>{escape(type_of(field))}</dd>"
        for name, field in schema.get("properties", {}).items()
    ]
    return f"<dl>{''.join(rows)}</dl>"


def type_of(field: dict[str, Any]) -> str:
    """A field's type in a word or two."""
    kinds = field.get("anyOf", [field])
    names = [kind.get("type") or kind.get("$ref", "any").rpartition("/")[2] for kind in kinds]
    return " or ".join(name for name in names if name != "null")
