"""What a resumed bench must share with the run it goes on: models, prompts, device, versions."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import foretoken
from foretoken.bench import environment
from foretoken.bench.interpreters import Interpreter
from foretoken.bench.journal import Journal
from foretoken.bench.metrics import REFERENCES
from foretoken.bench.rows import RowSpec
from foretoken.bench.tasks import Task
from foretoken.lm.load import locate

if TYPE_CHECKING:
    from foretoken.bench.models import Models
    from foretoken.bench.run import BenchConfig

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
CONFIGS = ("config.json", "head.json", "tokenizer.json", "draft_vocabulary.json")
WORDS = ("controller", "verifier", "preset", "kernels", "compile")  # options that name no file
PIECE = 1 << 20  # bytes read at the beginning, in the middle and at the end of a file


def header(config: BenchConfig, tasks: Sequence[Task], models: Models) -> dict[str, Any]:
    """What a resumed run must share with the first; methods and repetitions may grow."""
    return {
        "models": models.names(),
        "contents": {role: model_contents(one) for role, one in models.sources.items()},
        "parameters": models.parameters["target"],
        "dtype": models.dtype,
        "device": models.device.type,
        "device_name": device_name(models.device),
        **models.asked_words(),
        "tasks": [task.id for task in tasks],
        "prompts": shortened(json.dumps([task.turns for task in tasks])),
        **config.writing(),
        "threads": torch.get_num_threads(),
        "version": foretoken.__version__,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }


def device_name(device: torch.device) -> str:
    """The model of the GPU or processor: a line with cells of two is no comparison."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else environment.cpu()


def forgetful(journal: Journal) -> list[str]:
    """A warning of rows that were interrupted in the middle of the texts they learn from."""
    rows = ", ".join(journal.notes.get("forgot", {}))
    words = (
        "interrupted; going on they knew nothing of the texts before, and may be faster than told"
    )
    return [f"{rows}: {words}"] if rows else []


def apart(journal: Journal, labels: Sequence[str]) -> list[str]:
    """A warning of rows that were mostly measured in other runs than the row they are compared
    with: what the machine did meanwhile is then a part of their speed-ups.
    """
    measured: dict[str, dict[tuple[str, int], int]] = {}
    for cell in journal.cells:
        measured.setdefault(cell.row, {})[cell.prompt, cell.repetition] = cell.run
    reference = next((row for row in (*REFERENCES, *labels) if row in measured), None)
    if reference is None:
        return []
    runs = measured[reference]
    both = {
        row: [run == runs[key] for key, run in measured[row].items() if key in runs]
        for row in labels
        if row in measured
    }
    rows = ", ".join(row for row, same in both.items() if 2 * sum(same) < len(same))
    words = "measured in another run than the reference, not interleaved"
    return [f"{rows}: {words} ({reference})"] if rows else []


def row_contents(spec: RowSpec, engines: Mapping[str, Interpreter]) -> dict[str, str]:
    """What lies in the files and folders that a row's options name, by option; of a row of another
    engine, the versions of its packages as well: that of one row says nothing of the others.
    """
    versions = engines[spec.engine].versions if spec.engine else {}
    named = {
        key: Path(os.path.expanduser(value))
        for key, value in spec.options.items()
        if isinstance(value, str | Path)
    }
    found = {
        key: contents(path) for key, path in named.items() if key not in WORDS and path.exists()
    }
    return found | dict(versions)


def model_contents(source: Any) -> str | None:
    """A short name for what lies in a model's folder; None of one that is in memory alone."""
    if not isinstance(source, str | Path):
        return None
    where = locate(source, "model")
    return contents(where) if isinstance(where, Path) else None


def contents(path: Path) -> str:
    """A short name for a file, or for the weights and configurations that lie in a folder: their
    sizes, and pieces of each. What a training leaves below it is no part of a model.
    """
    files = [path]
    if path.is_dir():
        own = sorted(one for one in path.iterdir() if one.is_file())
        files = [one for one in own if one.suffix in WEIGHTS or one.name in CONFIGS] or own
    return shortened(*(word for file in files for word in (file.name, *pieces(file))))


def pieces(path: Path) -> list[str | bytes]:
    """A file's size and some of its bytes: weights that were trained anew differ everywhere."""
    size = path.stat().st_size
    found: list[str | bytes] = [str(size)]
    with open(path, "rb") as file:
        for start in sorted({0, max(size // 2 - PIECE // 2, 0), max(size - PIECE, 0)}):
            file.seek(start)
            found.append(file.read(PIECE))
    return found


def shortened(*words: str | bytes) -> str:
    found = hashlib.sha256()
    for word in words:
        found.update(word.encode() if isinstance(word, str) else word)
        found.update(b"\0")
    return found.hexdigest()[:16]
