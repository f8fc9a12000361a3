"""`foretoken tune`: the fastest configuration for a target and prompts, within a time limit."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from foretoken.cli import options as o
from foretoken.cli.app import INTERRUPTED, app
from foretoken.cli.logs import hushed
from foretoken.errors import ConfigError

Names = Annotated[str | None, typer.Option(help="Draft models to try, with commas between them.")]


@app.command(
    epilog="Example: `foretoken tune --target ./model --prompts mine.jsonl --drafts ./small`"
)
def tune(
    target: o.Target = o.DEFAULT_TARGET,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="A JSON lines file of prompts like those it will be used for: `turns` go through "
            "the chat template, a `prompt` is continued as it is."
        ),
    ] = None,
    drafts: Names = None,
    datastores: Annotated[
        str | None,
        typer.Option(help="Folders of `foretoken datastore build`, with commas between them."),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="Folders of heads trained for the target (`foretoken train eagle3` and others), "
            "with commas between them."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time limit, loading counted.")] = 15.0,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the configuration and the page.")] = Path(
        "tuned"
    ),
    device: o.Device = None,
    dtype: o.Dtype = None,
    allow_pickle: o.AllowPickle = False,
    trust_remote_code: o.TrustRemoteCode = False,
    json_: o.AsJson = False,
) -> None:
    """Find the fastest way to decode with a model, by trying what there is.

    Tries every method that needs no training, every draft, head and datastore named, and says what
    training a draft would be worth. Writes tuned.json, which `--tuned` of generate, chat, serve
    and bench and `foretoken.load(tuned=...)` take, and page.html, which shows why. Ctrl-C ends it
    early and keeps the best so far.
    """
    began = perf_counter()
    if prompts is None:
        raise ConfigError(
            "foretoken tune was called without prompts.",
            "what is fastest depends on the text: it is measured on prompts like yours.",
            "pass --prompts FILE, JSON lines such as "
            '{"prompt": "..."} or {"turns": ["..."], "category": "..."}.',
        )
    from foretoken.bench.tasks import load_file

    tasks = load_file(prompts)
    from foretoken.bench.tune import report
    from foretoken.bench.tune.config import TuneConfig
    from foretoken.bench.tune.run import run_tune

    config = TuneConfig(
        target=target,
        drafts=listed(drafts),
        datastores=listed(datastores),
        heads=listed(heads),
        minutes=minutes,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        out=out,
        device=device,
        dtype=dtype,
        quiet=hushed(json_),
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    results = run_tune(config, tasks, spent=perf_counter() - began)
    from foretoken.cli.measure import show_results

    show_results(results, [out / name for name in report.NAMES], as_json=json_)
    if results["minutes"]["interrupted"]:
        raise typer.Exit(INTERRUPTED)


def listed(text: str | None) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(filter(None, (part.strip() for part in (text or "").split(","))))
