"""`foretoken train acceptance`: heads that say how far to draft, for specdec++ or mcsd-dynamic."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli import train as t


@t.train.command(epilog="Example: `foretoken train acceptance --out ./head --prompts 300`")
def acceptance(
    context: typer.Context,
    out: t.Out,
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    data: t.Data = None,
    for_: Annotated[
        str,
        typer.Option("--for", help="specdec++ (an acceptance head) or mcsd (a decision model)."),
    ] = "specdec++",
    model: Annotated[str, typer.Option(help="For mcsd: soft or hard.")] = "soft",
    count: Annotated[int, typer.Option("--prompts", help="Prompts to train on.")] = 600,
    new_tokens: Annotated[int, typer.Option(help="Tokens the target writes after each.")] = 64,
    temperature: Annotated[float, typer.Option(help="The head fits this one.")] = 1.0,
    weight: Annotated[float, typer.Option(help="Of a rejection in the loss; paper 6.")] = 6.0,
    mix: Annotated[float, typer.Option(help="Share of the target's own tokens read.")] = 0.15,
    blocks: Annotated[int, typer.Option(help="Residual blocks of the head.")] = 3,
    shared: Annotated[bool, typer.Option("--shared", help="One block, repeated.")] = False,
    labels: Annotated[str, typer.Option(help="accept (true chances) or outcome.")] = "accept",
    calibration: Annotated[
        str, typer.Option(help="none, temperature, shift, cape-bin or cape-kde.")
    ] = "none",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: 3 epochs.")] = None,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: t.Seed = 0,
    fresh: t.Fresh = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    json_: o.AsJson = False,
) -> None:
    """Train the head that tells specdec++ or mcsd-dynamic when to stop drafting."""
    t.require_extra()
    _check_options(context, for_)
    from foretoken.training import decision
    from foretoken.training.acceptance import Lesson, run
    from foretoken.training.capture import Capture
    from foretoken.training.decision import DecisionLesson
    from foretoken.training.objectives.acceptance import Acceptance

    lesson: Any
    train: Any
    if for_ == "mcsd":
        capture = Capture(new_tokens=new_tokens, temperature=temperature, mix=0.0, seed=seed)
        lesson = DecisionLesson(capture=capture, model=model, steps=steps, rate=rate)
        train = decision.run
    else:
        lesson = Lesson(
            capture=Capture(new_tokens=new_tokens, temperature=temperature, mix=mix, seed=seed),
            objective=Acceptance(weight=weight, labels=labels),
            blocks=blocks,
            shared=shared,
            steps=steps,
            rate=rate,
            calibration=calibration,
        )
        train = run
    found = t.taught(
        train, lesson, out, (target, draft), (data, count, seed),
        fresh=fresh, quiet=json_, device=device, dtype=dtype,
    )  # fmt: skip
    if json_:
        return
    show(found)
    print(out)


def _check_options(context: typer.Context, for_: str) -> None:
    """Refuse an unknown kind of head, and options that the kind asked for does not have."""
    from foretoken.errors import ConfigError

    others = {
        "specdec++": ("model",),
        "mcsd": ("weight", "mix", "blocks", "shared", "labels", "calibration"),
    }
    if for_ not in others:
        raise ConfigError(
            f"a head for {for_!r} was asked for.",
            "heads are trained for specdec++ and for mcsd.",
            "pass --for specdec++ or --for mcsd.",
        )
    sources = {name: context.get_parameter_source(name) for name in others[for_]}
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if given:
        told = ", ".join(f"--{name}" for name in given)
        raise ConfigError(
            f"{told} was asked for with --for {for_}.",
            f"{'an acceptance head' if for_ == 'mcsd' else 'a decision model'} has that option.",
            f"leave {told} out.",
        )


def show(found: dict[str, Any]) -> None:
    """How good the predictions are on held-out prompts, under every calibration."""
    from rich.console import Console
    from rich.table import Table

    title = f"held-out tokens, accepted with a mean chance of {found['acceptance']:.2f}"
    table = Table("calibration", "Brier", "of the mean alone", "KL", "ECE", title=title)
    rows = {"untrained": found["untrained"], **found["figures"]}
    for name, row in rows.items():
        values = (row["brier"], row["base"], row["divergence"], row["ece"])
        table.add_row(name, *(f"{value:.4f}" for value in values))
    Console().print(table)
