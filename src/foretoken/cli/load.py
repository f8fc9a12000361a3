"""`foretoken load`: how a server behaves under load, and two servers side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli.app import INTERRUPTED, app
from foretoken.cli.logs import hushed
from foretoken.cli.tune import listed
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.bench.load.arrivals import Level
    from foretoken.bench.load.config import LoadConfig
    from foretoken.bench.tasks import Task

BUILT_IN = 300  # prompts made where the number of requests is not known beforehand
MOST = 6000

Addresses = Annotated[
    list[str],
    typer.Argument(
        metavar="URL...",
        help="Servers that speak OpenAI's protocol; several take turns within every load.",
    ),
]
Names = Annotated[
    str | None, typer.Option(help="Of the servers in reports, with commas between them.")
]
Model = Annotated[
    str | None,
    typer.Option(help="One for all, or one for each server; default: the first it lists."),
]
Concurrency = Annotated[
    str | None,
    typer.Option(help="Closed loop: so many clients at once, such as 1,4,16 (the default)."),
]
Rate = Annotated[
    str | None,
    typer.Option(help="Open loop: so many requests per second arrive, such as 0.5,1,2."),
]
Day = Annotated[
    str | None,
    typer.Option(
        metavar="PEAK",
        help="Open loop whose rate follows a day pressed into --seconds (240); PEAK requests "
        "per second arrive in the busiest hour.",
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        help="Per load and server, over its rounds; default: in each round 4 per client, at least "
        "32; 64 of a rate."
    ),
]
Seconds = Annotated[
    float | None, typer.Option(help="Per load and server: nothing is sent afterwards.")
]
Think = Annotated[float, typer.Option(help="Closed loop: seconds that clients think, on average.")]
Rounds = Annotated[
    int | None,
    typer.Option(help="Turns of each server within a load; default: 1, or 2 for several."),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines as bench reads them, first turns only; default: six built-in families."
    ),
]
Endpoint = Annotated[str, typer.Option(help="chat or completions.")]
MaxTokens = Annotated[int, typer.Option(help="Of an answer.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Read answers piece by piece.")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Ask for all tokens: equal work for all servers.")
]
SloTtft = Annotated[
    float | None, typer.Option(help="Target: milliseconds to the first token, for goodput.")
]
SloTpot = Annotated[
    float | None, typer.Option(help="Target: milliseconds per token afterwards, for goodput.")
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Of arrivals and prompts, 0 by default; requests name one of their own only where "
        "this is given, and a server may draft more where no text has to be repeated."
    ),
]
Timeout = Annotated[float, typer.Option(help="Seconds that a request may take.")]
MaxInFlight = Annotated[
    int, typer.Option(help="Open loop: requests in flight at most; others wait, and count it.")
]
WarmUp = Annotated[int, typer.Option(help="Requests to each server before anything is measured.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="FORETOKEN_API_KEY",
        help="Sent to every server, of several between commas the first; in no report.",
    ),
]
AllowRemote = Annotated[
    bool, typer.Option("--allow-remote", help="Also load servers that are not on this machine.")
]
Out = Annotated[Path, typer.Option(help="Folder of the results.")]
Resume = Annotated[bool, typer.Option("--resume", help="Keep what an interrupted test finished.")]


@app.command(
    epilog="Example: `foretoken load http://127.0.0.1:8000 http://127.0.0.1:8080 "
    "--names ours,llama --concurrency 1,4,16 --max-tokens 64 --ignore-eos --slo-ttft 500`"
)
def load(
    addresses: Addresses,
    names: Names = None,
    model: Model = None,
    concurrency: Concurrency = None,
    rate: Rate = None,
    day: Day = None,
    requests: Requests = None,
    seconds: Seconds = None,
    think: Think = 0.0,
    rounds: Rounds = None,
    prompts: Prompts = None,
    endpoint: Endpoint = "chat",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    stream: Stream = True,
    ignore_eos: IgnoreEos = False,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    seed: Seed = None,
    timeout: Timeout = 300.0,
    max_in_flight: MaxInFlight = 512,
    warm_up: WarmUp = 3,
    api_key: ApiKey = None,
    allow_remote: AllowRemote = False,
    out: Out = Path("load-results"),
    resume: Resume = False,
    json_: o.AsJson = False,
) -> None:
    """Load a server and measure what its users would feel.

    --concurrency shows what it can do: N clients, each asking again as soon as it has its answer.
    --rate shows what users feel: requests arrive at random, however slow the server is, and their
    latency counts from when they arrived. --day does so over the course of a day.

    Writes load.json, load.md, plots and page.html: time to first token (TTFT), time per output
    token (TPOT), latency, tokens/s, and goodput, the share of requests within --slo-ttft and
    --slo-tpot. Ctrl-C ends it early with a report of what was done; --resume goes on.
    """
    from foretoken.bench.load.address import servers_of
    from foretoken.bench.load.config import LoadConfig
    from foretoken.bench.load.prompts import Writing
    from foretoken.bench.load.run import run_load
    from foretoken.bench.load.sample import Promise

    if think and (rate or day):
        raise ConfigError(
            f"--think {think:g} was passed with {'--rate' if rate else '--day'}.",
            "clients of a closed loop think; an open one sends by the clock.",
            "leave --think out, or pass --concurrency.",
        )
    config = LoadConfig(
        servers=tuple(servers_of(addresses, listed(names), allow_remote)),
        levels=levels(concurrency, rate, day),
        writing=Writing(
            endpoint=endpoint, max_tokens=max_tokens, temperature=temperature, stream=stream,
            ignore_eos=ignore_eos, seed=seed,
        ),
        models=listed(model),
        requests=requests, seconds=seconds, rounds=rounds, think=think,
        max_in_flight=max_in_flight, warm_up=warm_up, timeout=timeout,
        promise=Promise(ttft=in_seconds(slo_ttft), tpot=in_seconds(slo_tpot)),
        seed=seed or 0, out=out, resume=resume, quiet=hushed(json_), api_key=first_of(api_key),
    )  # fmt: skip
    results = run_load(config, load_tasks(prompts, needed(config), seed or 0))
    if json_:
        o.print_json(results)
    else:
        show(results, out)
    if results["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if not all(row["answered"] for one in results["levels"] for row in one["servers"].values()):
        raise typer.Exit(1)


def show(results: dict[str, Any], out: Path) -> None:
    """The tables on the terminal, and where the rest lies."""
    from rich.console import Console

    from foretoken.bench.load.report import brief

    console = Console(soft_wrap=True, highlight=False)
    console.print("\n".join(brief(results)), markup=False)
    console.print(f"page: {out / 'page.html'}", style="dim")


def levels(concurrency: str | None, rate: str | None, day: str | None) -> tuple[Level, ...]:
    """The loads that were asked for, of one kind."""
    from foretoken.bench.load.arrivals import Level

    given = {"closed": concurrency, "poisson": rate, "day": day}
    asked = {kind: text for kind, text in given.items() if text is not None}
    if len(asked) > 1:
        raise ConfigError(
            "more than one of --concurrency, --rate and --day was passed.",
            "a load test is of one kind: clients that wait, arrivals at a rate, or a day of them.",
            "run one after the other, each with its own --out.",
        )
    kind, text = next(iter(asked.items()), ("closed", "1,4,16"))
    try:
        found = tuple(Level(kind, float(part)) for part in dict.fromkeys(listed(text)))
    except ValueError:
        found = ()
    if not found:
        raise ConfigError(
            f"loads of {text!r} were asked for.",
            "loads are numbers with commas between them.",
            "pass for example --concurrency 1,4,16, --rate 0.5,1,2 or --day 2.",
        )
    return found


def in_seconds(milliseconds: float | None) -> float | None:
    """A target, which is above 0."""
    if milliseconds is not None and not milliseconds > 0:
        raise ConfigError(
            f"a target of {milliseconds:g} milliseconds was passed.",
            "targets are above 0.",
            "pass for example --slo-ttft 500 --slo-tpot 50.",
        )
    return None if milliseconds is None else milliseconds / 1000.0


def needed(config: LoadConfig) -> int:
    """How many prompts a test wants, so that no server sees one twice."""
    total = config.warm_up
    for level in config.levels:
        limit = config.limit(level)
        if limit.requests is None:
            expected = level.value * (limit.seconds or 0.0) if level.open else BUILT_IN
            total += math.ceil(config.turns * (expected + 4 * math.sqrt(expected)))
        else:
            total += config.turns * limit.requests
    return min(total, MOST)


def load_tasks(prompts: Path | None, count: int, seed: int) -> Sequence[Task]:
    """The prompts of a file, or enough of the six built-in families."""
    from foretoken.bench.tasks import from_examples, load_file

    if prompts is not None:
        return load_file(prompts)
    from foretoken.minis.tasks import FAMILIES, examples

    each = math.ceil(count / len(FAMILIES))
    return [
        task for family in FAMILIES for task in from_examples(examples(family, "test", each, seed))
    ]


def first_of(keys: str | None) -> str | None:
    """One of the keys that a server was given between commas."""
    return next(iter(listed(keys)), None)
