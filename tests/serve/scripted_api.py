"""A server that speaks what the page reads, with answers that were written beforehand."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "src" / "foretoken" / "serve" / "page" / "index.html"


def step(accepted: list[str], own: str, wrong: tuple[str, ...] = (), root: str = "") -> dict:
    """What a step tells: guesses that were accepted, guesses that were not, the target's token."""
    kind = "corrected" if wrong else "own"
    told = [{"text": text, "kind": "guessed"} for text in accepted] + [{"text": own, "kind": kind}]
    last = len(accepted)
    parents = [-1, *range(last), *([last] * len(wrong))]
    tree = {"tokens": [root, *accepted, *wrong], "parents": parents}
    tree["accepted"] = list(range(1, last + 1))
    return {
        "tokens": told,
        "accepted": last,
        "drafted": last + len(wrong),
        "depth": last + bool(wrong),
        "corrected": bool(wrong),
        "tree": tree,
    }


def plain(step: dict) -> list[dict]:
    """The same text as the target writes it by itself: a step for every token."""
    return [
        {
            "tokens": [{"text": token["text"], "kind": "own"}],
            "accepted": 0,
            "drafted": 0,
            "depth": 0,
            "corrected": False,
            "tree": {"tokens": [""], "parents": [-1], "accepted": []},
        }
        for token in step["tokens"]
    ]


class ScriptedAPI(ThreadingHTTPServer):
    """Answers with `steps`, or refuses with `refusal`; `asked` keeps what came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.steps: list[dict] = []
        self.pause = 0.0  # seconds before each step, and before a refusal
        self.names = ["scripted"]  # of the models that it lists
        self.refusal: tuple[int, str] | None = None
        self.templates = True  # whether the model has a chat template
        self.breaks_off = False  # ends the stream without its end
        self.headers: dict[str, str] = {}
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.left = threading.Event()  # a client went away in the middle of a stream
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)

    def __enter__(self) -> "ScriptedAPI":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: ScriptedAPI

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def reply(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {
            "content-type": kind,
            "content-length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, words: str) -> None:
        told = {"error": {"message": words, "type": "x", "param": None, "code": None}}
        self.reply(status, json.dumps(told).encode(), "application/json")

    def do_GET(self) -> None:
        if self.path == "/":
            self.reply(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.server.refusal is not None:
            self.refuse(*self.server.refusal)
        elif self.path == "/v1/models":
            models = [{"id": name, "object": "model"} for name in self.server.names]
            told = {"object": "list", "data": models}
            self.reply(200, json.dumps(told).encode(), "application/json")
        else:
            self.reply(404, b"{}", "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        api = self.server
        api.asked.append((self.path, body, {k.lower(): v for k, v in self.headers.items()}))
        refusal, chat = api.refusal, self.path == "/v1/chat/completions"
        if refusal is None and chat and not api.templates:
            refusal = (400, "this model has a tokenizer without a chat template.")
        if refusal is None and body.get("model") not in (None, "scripted"):
            refusal = (404, f"the model {body['model']!r} was asked for.")
        if refusal is not None:
            time.sleep(api.pause)
            self.refuse(*refusal)
            return
        try:
            self.stream(body, chat)
        except (BrokenPipeError, ConnectionResetError):
            api.left.set()

    def stream(self, body: dict[str, Any], chat: bool) -> None:
        api = self.server
        self.send_response(200)
        for name, value in {"content-type": "text/event-stream", **api.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        guesses = body.get("speculation") is not False
        steps = api.steps if guesses else [one for each in api.steps for one in plain(each)]
        for told in steps:
            time.sleep(api.pause)
            text = "".join(token["text"] for token in told["tokens"])
            self.send(choices=[choice(text, chat)], foretoken=told)
        if api.breaks_off:
            return
        end = {"stats": {}, "estimate": {"speedup": 1.75}}
        usage = {"completion_tokens": sum(len(told["tokens"]) for told in steps)}
        self.send(choices=[choice("", chat, "stop")], foretoken={**end, "tokens": []})
        self.send(choices=[], usage=usage)
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, **chunk: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n")
        self.wfile.flush()


def choice(text: str, chat: bool, finish: str | None = None) -> dict[str, Any]:
    said = {"delta": {"content": text}} if chat else {"text": text}
    return {"index": 0, "finish_reason": finish, **said}
