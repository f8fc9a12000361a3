"""The command group: every command of the house, and how errors reach a terminal."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from foretoken.errors import ForetokenError

MISTAKE = 2  # exit status of a refused request; a failed audit exits with 1


class Commands(TyperGroup):
    """Shows a ForetokenError as its three parts, without a traceback."""

    order = ("generate", "chat", "bench", "audit", "train", "datastore", "methods", "minis")

    def list_commands(self, ctx: Any) -> list[str]:
        """What most people want first."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda n: self.order.index(n) if n in self.order else len(names))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ForetokenError as error:
            tell(error)
            raise typer.Exit(MISTAKE) from error
        except KeyboardInterrupt as stopped:
            raise typer.Exit(130) from stopped


def tell(error: ForetokenError) -> None:
    """The error on stderr: what was asked, what is possible here, what to do."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text("error: ", style="bold red") + Text(error.asked))
    console.print(Text("  possible here: ", style="bold") + Text(error.possible))
    console.print(Text("  what to do: ", style="bold") + Text(error.do))


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


def main() -> None:
    """Entry point of the `foretoken` script."""
    app()


# Commands register themselves on import; the imports stand below because they need `app`.
from foretoken.cli import catalogue, datastore, measure, minis, train_acceptance, train_exits, write  # noqa: E402, F401
