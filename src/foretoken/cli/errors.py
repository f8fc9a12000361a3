"""How errors reach a terminal or a program: three parts in lines, or as one JSON document."""

from __future__ import annotations

import json
import os
import re
import sys
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from rich.text import Text

from foretoken.errors import ConfigError, ForetokenError, meant

FAILED, MISTAKE = 1, 2  # exit statuses: what was asked for did not work out, or cannot work
EXTRAS = {  # modules that only some installations have -> the extra that brings them
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "psutil": "bench",
    "httpx": "serve",
    "matplotlib": "train",
    "accelerate": "train",
    "datasets": "train",
    "scipy": "audit",
    "llguidance": "guided",
    "lm_eval": "eval",
    "ray": "ray",
}
OF_COMMAND = {"foretoken train": "train", "foretoken eval": "eval"}  # which needs several of them


def tell(error: ForetokenError, as_json: bool = False) -> None:
    """The error on stderr, or as a document on stdout: asked, possible here, what to do."""
    if as_json and written_as_json(error):
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text("error: ", style="bold red") + Text(error.asked))
    console.print(Text("  possible here: ", style="bold") + Text(error.possible))
    console.print(Text("  what to do: ", style="bold") + Text(error.do))


def written_as_json(error: ForetokenError) -> bool:
    """Whether the document reached stdout, which may itself be what failed."""
    parts = {"asked": error.asked, "possible": error.possible, "do": error.do}
    try:
        print_json({"error": parts})
    except OSError:
        give_up_unwritten()
        return False
    return True


def escape_what_is_lacking() -> None:
    """Have characters that stdout's encoding lacks written as escapes: a text goes on behind it."""
    if isinstance(sys.stdout, TextIOWrapper) and not holds_all():
        sys.stdout.reconfigure(errors="backslashreplace")


def holds_all() -> bool:
    """Whether stdout's encoding has all characters."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def print_json(document: Any) -> None:
    """One JSON document on stdout, all of it or nothing.

    Escapes stand for what stdout cannot hold, and for halves of characters, which no UTF-8 can.
    """
    plain = not holds_all()
    text = json.dumps(document, indent=2, ensure_ascii=plain)
    try:
        text.encode()
    except UnicodeEncodeError:  # such as of a file's name in bytes that are no UTF-8
        text = json.dumps(document, indent=2)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def flush_output() -> None:
    """Write out what stdout holds back; a program that was begun without one has none."""
    if sys.stdout is not None:
        sys.stdout.flush()


def give_up_unwritten() -> None:
    """Let what stdout could not write go: at its end Python would try, and fail, once more."""
    try:
        flush_output()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def missing_extra(error: ModuleNotFoundError, command: str) -> ConfigError | None:
    """What to install for a command whose module is missing; None for a module we do not know."""
    module = (error.name or "").split(".")[0]
    if module not in EXTRAS:
        return None
    extra = OF_COMMAND.get(" ".join(command.split()[:2]), EXTRAS[module])
    return ConfigError(
        f"{command} was called.",
        f"this installation lacks {module}, which it needs.",
        f"install it: pip install 'foretoken[{extra}]'.",
    )


def unusable(error: OSError, command: str) -> ForetokenError:
    """A file, folder or disk that did not do what a command needed."""
    if not isinstance(error.filename, str | os.PathLike):
        return ForetokenError(
            f"{command} stopped.",
            f"the system says: {error.strerror or error}.",
            "see to that (a disk with room, an address that is free), then call again.",
        )
    return ForetokenError(
        f"{command} stopped at a file: {os.fspath(error.filename)}.",
        f"the system says: {error.strerror or error}.",
        "check that the path exists, may be written, and that the disk has room; then call again.",
    )


def out_of_memory(error: Exception, command: str) -> ForetokenError | None:
    """What to do where memory ran out; None for any other error."""
    from foretoken.lm.unreadable import NO_MEMORY, first_line, no_memory

    if not isinstance(error, MemoryError) and NO_MEMORY.search(str(error)) is None:
        return None
    return no_memory(f"{command} ran out of memory: {first_line(error)}.")


def misuse(error: Any, context: Any) -> ConfigError:
    """A command line that cannot be understood, in our three parts.

    `error` is a UsageError of the option parser, and `context` the command it was met in.
    """
    context = error.ctx or context
    command = context.command_path
    children = context.command.list_commands(context) if is_group(context.command) else []
    options = [name for one in context.command.params for name in one.opts if name[:2] == "--"]
    message = re.split(r" \(Possible|\. Did you", error.format_message())[0].rstrip(".")
    asked = getattr(error, "option_name", None)
    close = ""
    if asked:
        close = f"{meant(asked, options)} "
    elif children and (named := re.search("'(.*)'", message)):
        close = f"{meant(named.group(1), children)} "
    what, known = ("commands", children) if children and not asked else ("options", options)
    return ConfigError(
        f"{command}: {message}.",
        f"{what} are {', '.join(known)}.",
        f"{close}`{command} --help` shows them with an example.",
    )


def is_group(command: Any) -> bool:
    """Whether a command has commands of its own."""
    return hasattr(command, "list_commands")
