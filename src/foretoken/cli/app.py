"""The command group that commands join by decorators, and where their errors are caught.

A leaf: it imports no command. `foretoken.cli.commands` puts all of them together.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from foretoken.cli.errors import (
    FAILED,
    MISTAKE,
    escape_what_is_lacking,
    flush_output,
    give_up_unwritten,
    missing_extra,
    misuse,
    out_of_memory,
    tell,
    unusable,
)
from foretoken.errors import ForetokenError

UsageError: Any = typer.BadParameter.__mro__[1]  # of the option parser, wherever typer keeps it
INTERRUPTED = 130
TYPED = "foretoken.typed"  # where a context keeps the arguments behind its command's name


class Commands(TyperGroup):
    """Shows every error a user can cause as its three parts, without a traceback."""

    order = (
        "generate",
        "chat",
        "serve",
        "tune",
        "plan",
        "bench",
        "load",
        "audit",
        "eval",
        "train",
        "heads",
        "vocabulary",
        "datastore",
        "methods",
        "minis",
    )

    def list_commands(self, ctx: Any) -> list[str]:
        """What most people want first."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda n: self.order.index(n) if n in self.order else len(names))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """A group without a command shows its help."""
        if not args and self.no_args_is_help:
            typer.echo(ctx.get_help())
            raise typer.Exit
        ctx.meta[TYPED] = list(args)
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            tell(misuse(error, ctx), "--json" in ctx.meta[TYPED])
            raise typer.Exit(MISTAKE) from error

    def invoke(self, ctx: Any) -> Any:
        """Run a command; what it refuses or cannot do ends as a message and an exit status."""
        typed = ctx.meta[TYPED]
        as_json = "--json" in typed
        command = " ".join([ctx.command_path, *typed[:1]])
        escape_what_is_lacking()
        try:
            return self.written(ctx)
        except ForetokenError as error:
            tell(error, as_json)
            raise typer.Exit(MISTAKE) from error
        except UsageError as error:
            tell(misuse(error, ctx), as_json)
            raise typer.Exit(MISTAKE) from error
        except ModuleNotFoundError as error:
            missing = missing_extra(error, command)
            if missing is None:
                raise
            tell(missing, as_json)
            raise typer.Exit(MISTAKE) from error
        except BrokenPipeError:
            raise  # the reader of a pipe has left; the parser's own answer is a quiet exit
        except OSError as error:
            tell(unusable(error, command), as_json)
            give_up_unwritten()
            raise typer.Exit(FAILED) from error
        except (typer.Exit, typer.Abort):
            raise  # errors of the run time, to Python
        except (MemoryError, RuntimeError) as error:
            lacking = out_of_memory(error, command)
            if lacking is None:
                raise
            tell(lacking, as_json)
            raise typer.Exit(FAILED) from error
        except KeyboardInterrupt as stopped:
            raise typer.Exit(INTERRUPTED) from stopped

    def written(self, ctx: Any) -> Any:
        """Run a command, and write out what it printed while errors of that can still be told."""
        try:
            found = super().invoke(ctx)
        except typer.Exit:
            flush_output()
            raise
        flush_output()
        return found


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Speculative decoding for Hugging Face causal language models: faster text, the same law.",
    epilog="Example: `foretoken generate 'Once upon a time' --show`",
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from foretoken import __version__

        print(__version__)
        raise typer.Exit
