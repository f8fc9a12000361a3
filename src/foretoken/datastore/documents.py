"""Documents from files: a text file is one, a line of a .jsonl file is one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from foretoken.errors import ConfigError


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files named, and all readable as UTF-8 in the folders named, in order of their names."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [f for f in sorted(path.rglob("*")) if f.is_file() and _shown(f, path)]
            found += [file for file in inside if _is_text(file)]
        elif path.is_file():
            found.append(path)
        else:
            raise ConfigError(
                f"texts from {path} were asked for.",
                "there is no such file or folder.",
                "check the path.",
            )
    if paths and not found:
        raise ConfigError(
            f"texts from {', '.join(map(str, paths))} were asked for.",
            "there is no text file in it.",
            "name text files in UTF-8, .jsonl files, or folders of such.",
        )
    return found


def read(path: Path) -> Iterator[str]:
    """The documents of one file, empty ones left out."""
    try:
        if path.suffix != ".jsonl":
            text = path.read_text(encoding="utf-8-sig")
            if text.strip():
                yield text
            return
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _record(line, path, number)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"texts from {path} were asked for.",
            f"it is no text in UTF-8: byte {error.object[error.start]:#04x} at {error.start} "
            "begins no letter; it may be Latin-1, or no text at all.",
            "write it anew in UTF-8, such as: iconv -f latin1 -t utf-8 OLD > NEW.",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"texts from {path} were asked for.",
        f"it cannot be read ({error.strerror or error}).",
        "check the path and who may read it.",
    )


def _record(line: str, path: Path, number: int) -> str:
    """The text of one JSON line; a prompt and its answer are one text."""
    try:
        record = json.loads(line)
        whole = "text" in record
        parts = [record["text"]] if whole else [record["prompt"], record.get("answer", "")]
        if not all(isinstance(part, str) for part in parts):
            raise TypeError("a text is a string, no list of ids or messages")
        return "".join(parts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"texts from {path} were asked for.",
            'a line looks like {"text": "..."} or {"prompt": "...", "answer": "..."}.',
            f"mend line {number} ({error}).",
        ) from error


def _shown(file: Path, folder: Path) -> bool:
    """Whether neither a file nor a folder around it is hidden."""
    return not any(part.startswith(".") for part in file.relative_to(folder).parts)


def _is_text(file: Path) -> bool:
    """Whether the beginning of a file reads as text."""
    try:
        with open(file, "rb") as opened:
            start = opened.read(4096)
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start > len(start) - 4 and b"\0" not in start  # a character cut in two
    return bool(start) and b"\0" not in start
