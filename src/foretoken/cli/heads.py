"""`foretoken heads`: what a head is, the mean of several, folders that other engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli.app import Commands, app

heads = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Heads on a target's hidden states: look at one, average several, write it for others.",
    epilog="Example: `foretoken heads show smollm2-135m-eagle3`",
)
app.add_typer(heads, name="heads")

Head = Annotated[
    str, typer.Argument(help="Folder of a head: trained here, published, or a shipped name.")
]


@heads.command(epilog="Example: `foretoken heads show smollm2-135m-eagle3`")
def show(head: Head, json_: o.AsJson = False) -> None:
    """Tell what a head is: its kind, its shape, its size, and which method drafts with it."""
    from foretoken.heads import export, store
    from foretoken.heads.table import head_row

    card = store.card_of(head)
    module, _ = store.load(head, card.kind)
    layouts = [name for name, layout in export.LAYOUTS.items() if card.kind in layout.kinds]
    found: dict[str, Any] = {
        "kind": card.kind,
        "what": head_row(card.kind).summary,
        "method": head_row(card.kind).serves,
        "parameters": sum(part.numel() for part in module.parameters()),
        "hidden_size": card.hidden_size,
        "vocab_size": card.vocab_size,
        "options": dict(card.options),
        "notes": dict(card.notes),
        "layouts": layouts,
    }
    if json_:
        o.print_json(found)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", str(head), show_header=True)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), told(value))
    Console().print(table)


def told(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {told(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(told, value)) or "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@heads.command(
    epilog="Example: `foretoken heads export ./head --to ./published --layout eagle "
    "--target smollm2-135m`"
)
def export(
    head: Head,
    to: Annotated[Path, typer.Option(help="New folder.")],
    layout: Annotated[
        str, typer.Option(help="eagle (EAGLE-1 and 2), eagle3, speculators (EAGLE-3) or medusa.")
    ],
    target: Annotated[
        str | None,
        typer.Option(help="The head's target, to name it, and for its embeddings where due."),
    ] = None,
    json_: o.AsJson = False,
) -> None:
    """Write a head as its authors publish such heads, for their code, vLLM and others.

    EAGLE's own code wants the target's embeddings in the folder, and speculators the target's name:
    pass --target. Heads of `train eagle3` compute something else than published EAGLE-3 heads do,
    and cannot be written as one; published folders themselves can, from either layout to the other.
    """
    from foretoken.heads.export import LAYOUTS, Base
    from foretoken.heads.export import export as write

    base = None
    if target is not None and layout in LAYOUTS:
        from foretoken.lm.load import load_model

        base = Base.of(load_model(o.source(target)), target)
    folder = write(head, to, layout, base)
    if json_:
        files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
        o.print_json({"folder": str(folder), "layout": layout, "bytes": files})
    else:
        print(folder)


@heads.command(
    epilog="Example: `foretoken heads average ./first ./second --share 1 --share 2 --out ./mean`"
)
def average(
    folders: Annotated[
        list[str], typer.Argument(help="Heads that go on from each other, two or more.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the mean.")],
    share: Annotated[
        list[float] | None,
        typer.Option(help="How much each counts, in their order; none: alike. Repeatable."),
    ] = None,
    json_: o.AsJson = False,
) -> None:
    """Write the mean of several heads' weights: often better than each, and costs what one costs.

    For heads that were trained on from one beginning, such as one and what `foretoken train eagle3
    --set start=HEAD` made of it. Heads from different random weights have no mean worth having.
    """
    from foretoken.training.averaging import average as write

    folder = write(folders, share or [1.0] * len(folders), out)
    if json_:
        o.print_json({"folder": str(folder)})
    else:
        print(folder)
