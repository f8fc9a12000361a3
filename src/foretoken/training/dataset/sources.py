"""Ordinary text and chats of others: files, folders, JSON lines, data sets of `datasets`.

Everything is read and checked before anything is scored, so a bad record leaves nothing half done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError

PLAIN, LINES = ".txt", (".jsonl", ".json")
EXAMPLES = '{"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
SAVED = ("dataset_info.json", "dataset_dict.json")  # in a folder that `save_to_disk` wrote


@dataclass(frozen=True, slots=True)
class Record:
    """A text, or the messages of a chat, and where it was read."""

    source: str  # as it was asked for
    where: str  # file and line, for messages
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()


def read_source(source: str) -> Iterator[Record]:
    """The records of a file, of a folder of files, or of a data set, in order."""
    path = Path(source)
    if path.is_file():
        yield from read_file(source, path)
    elif path.is_dir() and (files := files_of(path)):
        for one in files:
            yield from read_file(source, one)
    elif path.is_dir() or not looks_like_a_path(source):
        yield from read_data_set(source)
    else:
        raise ConfigError(
            f"text from {source} was asked for.",
            "there is no such file or folder.",
            "pass a .txt or .jsonl file, a folder of such, or the name of a data set.",
        )


def looks_like_a_path(source: str) -> bool:
    """Whether a name that is not there was meant as a path; data sets are named `owner/name`."""
    return source.startswith((".", "/", "~")) or Path(source).suffix in (PLAIN, *LINES)


def files_of(folder: Path) -> list[Path]:
    """The files of text below a folder, in the order of their names; none in a saved data set."""
    if any((folder / name).is_file() for name in SAVED):
        return []
    return sorted(path for path in folder.rglob("*") if path.suffix in (PLAIN, ".jsonl"))


def read_file(source: str, path: Path) -> Iterator[Record]:
    """A text file as one record, or the records of JSON lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise bad(str(path), f"the file cannot be read ({error})", "text is UTF-8") from error
    if path.suffix not in LINES:
        if text.strip():
            yield Record(source, str(path), text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                found = json.loads(line)
            except ValueError as error:
                raise bad(where, f"the line is no JSON ({error})") from error
            yield from record(source, where, found)


def record(source: str, where: str, found: Any) -> Iterator[Record]:
    """One record, checked; nothing for an empty text."""
    if not isinstance(found, Mapping) or not {"text", "messages"} & found.keys():
        has = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise bad(where, f"it has neither a text nor messages, but {has or 'nothing'}")
    text, messages = found.get("text"), found.get("messages")
    if messages is not None:
        yield Record(source, where, messages=checked(where, messages))
    elif not isinstance(text, str):
        raise bad(where, f"its text is {text!r}")
    elif text.strip():
        yield Record(source, where, text)


def checked(where: str, messages: Any) -> tuple[Mapping[str, str], ...]:
    """The messages of a chat, each with a role and a content."""
    turns = messages if isinstance(messages, list) else []
    if not all(isinstance(turn, Mapping) for turn in turns):
        turns = []
    told = [{name: turn.get(name) for name in ("role", "content")} for turn in turns]
    if not all(isinstance(value, str) for turn in told for value in turn.values()):
        raise bad(where, "a message of it lacks a role or a content that is text")
    if not any(turn["role"] == "user" for turn in told):
        raise bad(where, "no message of it is a user's")
    return tuple(told)


def read_data_set(source: str) -> Iterator[Record]:
    """The records of a data set: a folder, or `name` or `name:configuration` of the hub."""
    if find_spec("datasets") is None:
        raise ConfigError(
            f"text from the data set {source} was asked for.",
            "this installation lacks datasets, which reads it.",
            "install it: pip install datasets; or pass .txt or .jsonl files.",
        )
    try:
        for number, row in enumerate(opened(source), 1):
            yield from record(source, f"{source}, record {number}", row)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"text from the data set {source} was asked for.",
            f"it cannot be read ({error}).",
            "pass a folder of files, or a name as the hub has it, with a configuration as in "
            "name:configuration where it has several.",
        ) from error


def opened(source: str) -> Any:
    """The training split of a data set, read as it is asked for."""
    import datasets

    path = Path(source)
    if not path.is_dir():
        name, _, configuration = source.partition(":")
        return datasets.load_dataset(name, configuration or None, split="train", streaming=True)
    if not any((path / name).is_file() for name in SAVED):
        return datasets.load_dataset(source, split="train", streaming=True)
    found = datasets.load_from_disk(source)
    return found["train"] if isinstance(found, Mapping) else found


def bad(where: str, why: str, do: str = f"a line looks like {EXAMPLES}") -> ConfigError:
    """A record that cannot be used."""
    return ConfigError(f"text from {where} was asked for.", f"{why}.", f"mend it: {do}.")


def user_turns(messages: Sequence[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    """The chat up to each message of a user: what is to be answered."""
    return [list(messages[: i + 1]) for i, one in enumerate(messages) if one["role"] == "user"]
