"""`foretoken train`: parts that methods need besides their models, trained on what models say.

Every command draws its prompts by `prompts`, trains under `training.trainer` (resumes after a kill,
writes a loss curve) and leaves a folder that `heads.store` reads. A command of its own module joins
by `@train.command(...)`; its module is named at the end of this one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli.app import Commands, app
from foretoken.errors import ConfigError

HELD_OUT = 10  # one passage of a file in this many is kept for judging

train = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Train what methods need besides their models, from what the models themselves say.",
    epilog="Example: `foretoken train acceptance --out ./head`",
)
app.add_typer(train, name="train")

Out = Annotated[Path, typer.Option(help="Folder of the head; a killed run resumes there.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Text file of passages, or .jsonl with a prompt each; default: own tasks."),
]
Prompts = Annotated[int, typer.Option(help="Prompts to train on.")]
Seed = Annotated[int, typer.Option(help="Of prompts, samples and weights.")]
Steps = Annotated[int, typer.Option(help="Optimizer steps.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over, do not resume.")]


def prompts(data: Path | None, split: str, count: int, seed: int = 0) -> list[str]:
    """`count` prompts of a split ("train" or "valid"): from a file, or of the six families."""
    if count < 1:
        raise ConfigError(
            f"{count} prompts were asked for.", "training needs 1 or more.", "pass a larger number."
        )
    if data is not None:
        return _passages(data, split)[:count]
    from foretoken.minis import tasks

    each = -(-count // len(tasks.FAMILIES))
    drawn = [tasks.examples(family, split, each, seed) for family in tasks.FAMILIES]
    return [example.prompt for turn in zip(*drawn, strict=True) for example in turn][:count]


def taught(
    run: Callable[..., dict[str, Any]],
    lesson: Any,
    out: Path,
    pair: tuple[str, str | None],
    passages: tuple[Path | None, int, int],
    *,
    fresh: bool,
    quiet: bool,
    **loading: Any,
) -> dict[str, Any]:
    """Run a lesson for a pair on passages (a file or None, how many, seed); its figures.

    One passage in ten is held out. Quiet is for JSON, which is printed here.
    """
    data, count, seed = passages
    held_out = max(1, count // HELD_OUT)
    some = prompts(data, "train", count, seed), prompts(data, "valid", held_out, seed)
    target, draft = pair
    session = o.open_session(
        target=target, draft=draft, method="chain", given=None, quiet=quiet, **loading
    )
    with session:
        found = run(session, some, lesson, out, fresh=fresh, show=not quiet)
    if quiet:
        o.print_json(found)
    return found


def require_extra() -> None:
    """What training needs beyond the package's own requirements, before any work is done."""
    missing = [name for name in ("accelerate", "matplotlib") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "training was asked for.",
            f"this installation lacks {' and '.join(missing)}.",
            "install them: pip install 'foretoken[train]'.",
        )


def _passages(data: Path, split: str) -> list[str]:
    """The passages of a file, between empty lines or one to a JSON line, of one split."""
    try:
        text = data.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prompts from {data} were asked for.",
            f"the file cannot be read ({error}).",
            "pass a text file in UTF-8.",
        ) from error
    if data.suffix == ".jsonl":
        found = [_prompt(data, line) for line in text.splitlines() if line.strip()]
    else:
        found = [passage.strip("\n") for passage in text.split("\n\n") if passage.strip()]
    if len(found) < 2:
        raise ConfigError(
            f"prompts from {data} were asked for.",
            f"it holds {len(found)}; one to train on and one to judge by are the least.",
            "pass a file of many passages with empty lines between them, or a .jsonl file.",
        )
    held_out = [i % HELD_OUT == min(HELD_OUT, len(found)) - 1 for i in range(len(found))]
    return [one for one, held in zip(found, held_out, strict=True) if held == (split != "train")]


def _prompt(data: Path, line: str) -> str:
    """The prompt of one JSON line."""
    try:
        record = json.loads(line)
        return str(record["prompt"] if "prompt" in record else record["text"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"prompts from {data} were asked for.",
            'a line looks like {"prompt": "..."}.',
            f"mend the line that starts with {line[:60]!r} ({error}).",
        ) from error
