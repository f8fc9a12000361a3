"""`foretoken train exits`: the predictors with which specee leaves the target's layers early."""

from __future__ import annotations

from typing import Annotated

import typer

from foretoken.cli import options as o
from foretoken.cli import train as t


@t.train.command(epilog="Example: `foretoken train exits --out ./predictors --prompts 200`")
def exits(
    out: t.Out,
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    data: t.Data = None,
    count: Annotated[int, typer.Option("--prompts", help="Prompts to train on.")] = 200,
    new_tokens: Annotated[int, typer.Option(help="Tokens the target writes after each.")] = 64,
    candidates: Annotated[int, typer.Option(help="Likely tokens looked at; paper 4.")] = 4,
    hidden: Annotated[int, typer.Option(help="Units of a predictor; paper 512.")] = 512,
    steps: t.Steps = 600,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: t.Seed = 0,
    fresh: t.Fresh = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    json_: o.AsJson = False,
) -> None:
    """Train the predictors that tell specee when a layer has said it all."""
    t.require_extra()
    from foretoken.training.exits import ExitLesson, run

    lesson = ExitLesson(
        new_tokens=new_tokens,
        candidates=candidates,
        hidden=hidden,
        steps=steps,
        rate=rate,
        seed=seed,
    )
    found = t.taught(
        run, lesson, out, (target, draft), (data, count, seed),
        fresh=fresh, quiet=json_, device=device, dtype=dtype,
    )  # fmt: skip
    if json_:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("layer", "right", "larger class", "always asked", title="held-out tokens")
    pairs = zip(found["accuracy"], found["majority"], strict=True)
    for layer, (right, larger) in enumerate(pairs):
        asked = "yes" if layer in found["often"] else ""
        table.add_row(str(layer), f"{right:.3f}", f"{larger:.3f}", asked)
    Console().print(table)
    print(out)
