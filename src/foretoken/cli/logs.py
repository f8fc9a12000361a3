"""How much commands tell: `-v` and `-q` on every command, over `logging.getLogger("foretoken")`.

By default commands name their stages and end with a line of figures; `-v` adds what happened at
load (kernels, probes, measured costs), `-vv` everything; `-q` leaves warnings and errors only.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console

HOUSE = logging.getLogger("foretoken")
COMMANDS = logging.getLogger("foretoken.cli")  # what commands tell about themselves
SECONDS_BETWEEN_LINES = 60.0

Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, metavar="",
        help="Also tell what loading chose and measured; twice: everything.",
    ),
]  # fmt: skip
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Tell nothing but the result and errors.")
]


class _Stderr(logging.Handler):
    """Lines on whatever standard error is when they are told."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def configure(verbose: int, quiet: bool) -> None:
    """Let a command tell this much."""
    if not any(isinstance(handler, _Stderr) for handler in HOUSE.handlers):
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(message)s"))
        HOUSE.addHandler(handler)
    loud = logging.DEBUG if verbose > 1 else logging.INFO
    HOUSE.setLevel(loud if verbose else logging.WARNING)
    COMMANDS.setLevel(logging.WARNING if quiet else loud)


def quiet() -> bool:
    """Whether a command is to tell its result only."""
    return not COMMANDS.isEnabledFor(logging.INFO)


def hushed(as_json: bool) -> bool:
    """Whether a command that prints one document, or its result only, leaves progress out."""
    return as_json or quiet()


def verbose() -> bool:
    """Whether what happens at load is wanted."""
    return HOUSE.isEnabledFor(logging.INFO)


@contextmanager
def stage(what: str, hush: bool = False) -> Iterator[None]:
    """A sign of life while something takes long: a spinner, or lines where there is no terminal."""
    console = Console(stderr=True)
    began = perf_counter()
    if hush and not verbose():
        yield
    elif console.is_interactive and not quiet() and not verbose():  # a dumb terminal draws none
        with console.status(what):
            yield
    else:
        COMMANDS.info("%s ...", what)
        yield
        COMMANDS.info("%s: done in %.1f s", what, perf_counter() - began)


@contextmanager
def status(what: str, hush: bool) -> Iterator[Callable[[str], None]]:
    """A sign of life that is told how far it is: a spinner, or a line about every minute."""
    console = Console(stderr=True)
    if hush:
        yield lambda news: None
    elif console.is_interactive:
        with console.status(what) as spinner:
            yield lambda news: spinner.update(f"{what}: {news}")
    else:
        COMMANDS.info("%s ...", what)
        written = perf_counter()

        def line(news: str) -> None:
            nonlocal written
            if perf_counter() - written >= SECONDS_BETWEEN_LINES:
                COMMANDS.info("%s: %s", what, news)
                written = perf_counter()

        yield line


def add_flags(app: typer.Typer) -> None:
    """Give every command of `app`, and of its groups, `-v` and `-q`."""
    for command in app.registered_commands:
        own = command.context_settings and command.context_settings.get("ignore_unknown_options")
        if command.callback is not None and not own:  # another program's -v is not ours
            command.callback = flagged(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_flags(group.typer_instance)


def flagged(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same command with two options more, which it does not have to know."""

    @functools.wraps(command)
    def told(*args: Any, verbose: int = 0, quiet: bool = False, **options: Any) -> Any:
        if verbose and quiet:
            from foretoken.errors import ConfigError

            raise ConfigError(
                "--verbose and --quiet were passed together.",
                "a command tells more than usual, or less.",
                "leave one of them out.",
            )
        configure(verbose, quiet)
        return command(*args, **options)

    signature = inspect.signature(command, eval_str=True)
    more = [
        inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=Verbose),
        inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet),
    ]
    whole = signature.replace(parameters=[*signature.parameters.values(), *more])
    told.__signature__ = whole  # type: ignore[attr-defined]
    told.__annotations__ = {name: one.annotation for name, one in whole.parameters.items()}
    return told
