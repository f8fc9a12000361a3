"""`foretoken serve`: an OpenAI-compatible server around one model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken import shipped
from foretoken.cli import options as o
from foretoken.cli.app import app
from foretoken.cli.logs import quiet
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.engine.session import Session
    from foretoken.serve.settings import Settings
    from foretoken.training.online.serving import IdleLearning

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
         "KB": 10**3, "MB": 10**6, "GB": 10**9}  # fmt: skip
KEY = "FORETOKEN_API_KEY"
# What names a folder or a file, of the options of a load and of methods.
PLACES = ("target", "draft", "tuned", "draft_vocabulary", "draft_head", "head", "datastore", "keys")
EXAMPLE = """Example: `foretoken serve --target ./model --draft ./small --port 8000`, and then

    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{"messages": [{"role": "user", "content": "Hello"}]}'

or in Python

    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    for chunk in client.chat.completions.create(model="model", stream=True, messages=[{"role": "user", "content": "Hello"}]): print(chunk)
"""  # noqa: E501


Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port; 0 takes one that is free.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        help="What clients call the model; default: the target's name, or the folder's of --tuned."
    ),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help=f"Answer only who sends this key; repeatable. Better in ${KEY}, between commas: other "
        "users of the machine can read arguments.",
    ),
]
MaxRows = Annotated[
    int | None, typer.Option(help="Texts decoded together; others wait. Default: 16.")
]
Queue = Annotated[int, typer.Option(help="Texts that may wait, of each API key; more get 429.")]
MaxTokensLimit = Annotated[
    int | None, typer.Option(help="Most new tokens of a text; default: the model's context.")
]
MaxBody = Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of a request.")]
PrefixCache = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Memory for texts that are over, from which those that begin alike go on; 0: off.",
    ),
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="What weights and texts may take together, see `foretoken plan`; a text that can "
        "never fit is refused.",
    ),
]
RequestTimeout = Annotated[
    float | None, typer.Option(help="Seconds until a request is ended; default: never.")
]
Grace = Annotated[
    float, typer.Option(help="Seconds that running texts get after SIGTERM or Ctrl-C.")
]
LogFile = Annotated[
    Path | None, typer.Option(help="A line of JSON per request; - or nothing: standard error.")
]
NoMetrics = Annotated[bool, typer.Option("--no-metrics", help="Answer no /metrics.")]
Learn = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Let the draft learn from what it guessed wrong, in moments without requests; what "
        "it learned is kept here, and a restart goes on. No text changes its law.",
    ),
]
LearnSet = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="With --learn: rate, passes, topics, share (of busy time), ...; repeatable.",
    ),
]
Ray = Annotated[
    bool,
    typer.Option(
        "--ray", help="Serve from replicas on the Ray cluster at $RAY_ADDRESS, or one started here."
    ),
]
Replicas = Annotated[int | None, typer.Option(help="With --ray: how many; default: 2.")]
MaxReplicas = Annotated[
    int | None, typer.Option(help="With --ray: start up to so many under load.")
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        help="With --ray: each replica tells its figures (/metrics) at the first free port from "
        "here on; default: nowhere."
    ),
]
Threads = Annotated[
    int | None, typer.Option(help="With --ray: cores of a replica; default: the machine's, shared.")
]


@app.command(epilog=EXAMPLE)
def serve(
    context: typer.Context,
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    draft_vocabulary: o.DraftVocabulary = None,
    method: o.MethodName = None,
    set_: o.Settings = None,
    tuned: o.TunedFile = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model_name: ModelName = None,
    api_key: ApiKey = None,
    max_rows: MaxRows = None,
    queue: Queue = 256,
    max_tokens_limit: MaxTokensLimit = None,
    max_body: MaxBody = "4MiB",
    prefix_cache: PrefixCache = "512MiB",
    memory_budget: MemoryBudget = None,
    request_timeout: RequestTimeout = None,
    grace: Grace = 30.0,
    log_file: LogFile = None,
    no_metrics: NoMetrics = False,
    learn: Learn = None,
    learn_set: LearnSet = None,
    ray: Ray = False,
    replicas: Replicas = None,
    max_replicas: MaxReplicas = None,
    threads: Threads = None,
    metrics_port: MetricsPort = None,
    no_generation_config: o.NoGenerationConfig = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    exact_bits: o.ExactBits = False,
    allow_pickle: o.AllowPickle = False,
    trust_remote_code: o.TrustRemoteCode = False,
) -> None:
    """Serve a model to clients of OpenAI's interface.

    /v1/completions, /v1/chat/completions and /v1/models as the openai client knows them; beyond
    these /health, /metrics (Prometheus), /docs and a chat at /. Requests of all clients are decoded
    together, each as it would be alone.

    SIGTERM or Ctrl-C lets running texts end (--grace), new ones get 503; a second one ends them.
    """
    from foretoken.serve.running import listen
    from foretoken.serve.settings import Settings

    limits = Settings(
        model_name=model_name or name_of(o.named_target(context, target, tuned), tuned),
        queue=queue,
        max_tokens_limit=max_tokens_limit,
        max_body=size("--max-body", max_body),
        api_keys=tuple(api_key or keys(os.environ.get(KEY, ""))),
        prefix_cache=size("--prefix-cache", prefix_cache),
        request_timeout=request_timeout,
        grace=grace,
        log_file=log_file or (None if quiet() else Path("-")),
        metrics=not no_metrics,
    )
    make_ready(limits.log_file)
    loading: dict[str, Any] = {
        "target": o.named_target(context, target, tuned), "tuned": tuned, "draft": draft,
        "draft_vocabulary": draft_vocabulary, "method": method, "given": set_,
        "device": device, "dtype": dtype, "exact_bits": exact_bits, "allow_pickle": allow_pickle,
        "trust_remote_code": trust_remote_code, "no_generation_config": no_generation_config,
        "memory_budget": memory_budget, **({} if max_rows is None else {"max_rows": max_rows}),
    }  # fmt: skip
    counts = {"replicas": replicas, "max_replicas": max_replicas, "threads": threads}
    counts["metrics_port"] = metrics_port
    budget = memory_budget or any(one.startswith("memory_budget=") for one in set_ or ())
    begin = learning_of(learn, learn_set, {"--ray": ray, "--memory-budget": budget})
    if ray_asked(ray, counts):
        run_replicas(o.to_load(**loading), limits, counts, host, port)
        return
    with listen(host, port) as socket, o.open_session(**loading) as session:
        learning = None if begin is None else begin(session)
        run(session, limits, socket, learning)
        session.save()
        if learning is not None:
            learning.finish()


def make_ready(log: Path | None) -> None:
    """Before any weight is read: refuse a log that cannot be written, and keep libraries small."""
    from foretoken.lm.runtime.heap import keep_few_products
    from foretoken.serve.request_log import opened

    if log is not None and log != Path("-"):
        os.close(opened(log))
    keep_few_products()


def learning_of(
    folder: Path | None, given: list[str] | None, others: dict[str, object]
) -> Callable[[Session], IdleLearning] | None:
    """What sets a session's draft to learn, where it is to; wrong combinations are refused."""
    from foretoken.training.config import configured
    from foretoken.training.online.serving import IdleLearning, ServingSettings, check_writable

    if folder is None:
        if given:
            raise ConfigError(
                "--learn-set was passed without --learn.",
                "without --learn DIR the draft stays as it is.",
                "pass --learn, too, or leave it out.",
            )
        return None
    why = {
        "--ray": "every replica would learn something else, into one folder.",
        "--memory-budget": "weights in training are in no plan.",
    }
    for name in (name for name, value in others.items() if value):
        raise ConfigError(f"--learn was passed with {name}.", why[name], "leave one of them out.")
    check_writable(folder)
    settings = configured(ServingSettings, o.settings(given, "--learn-set"), "--learn-set")
    return partial(IdleLearning, folder=folder, settings=settings)


def run(
    session: Session, limits: Settings, socket: object, learning: IdleLearning | None = None
) -> None:
    """Serve on a socket until a signal."""
    from rich.console import Console

    from foretoken.serve import app as application
    from foretoken.serve.running import Server, address_of

    server = Server(application(session, limits, learning))
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not quiet():
        for line in greeting(session, limits, address_of(socket)):  # type: ignore[arg-type]
            console.print(line, markup=False)
        if learning is not None:
            console.print(f"  learns  {learning}", markup=False)
    elif not session.engine.promise.lossless:
        console.print(str(session.engine.promise), style="bold", markup=False)
    server.run(sockets=[socket])  # type: ignore[list-item]


def run_replicas(
    loading: dict[str, Any], limits: Settings, counts: dict[str, Any], host: str, port: int
) -> None:
    """Serve from replicas until a signal."""
    if (file := loading.get("memory")) is not None:
        raise ConfigError(
            f"--set memory={file} was passed with --ray.",
            "every replica would remember something else, and none of them saves it.",
            "leave one of them out.",
        )
    from rich.console import Console

    from foretoken.serve import scale

    size = scale.Scale(**{name: value for name, value in counts.items() if value is not None})
    started = scale.begin(*whole_paths(loading, limits), size, host, port)
    if not quiet():
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"foretoken serves {limits.model_name} at {started.url}/v1 (and {started.url}/ for "
            "people)\n"
            f"  Ray     {size.replicas} replicas, at most {size.most}, of {size.cores} threads; "
            f"Ctrl-C stops within {limits.grace:g} s",
            markup=False,
        )
    scale.wait()
    scale.end(started)


def whole_paths(loading: dict[str, Any], limits: Settings) -> tuple[dict[str, Any], Settings]:
    """The same with whole paths: replicas start in a folder of the cluster's, where a relative one
    would be another file, or a name of the hub.

    Names of the hub and of shipped models stay, and `off`, which is no draft vocabulary.
    """
    found = dict(loading)
    for name in PLACES:
        value = loading.get(name)
        if not isinstance(value, str | Path) or value in ("", "off"):
            continue
        place = Path(os.path.expanduser(value))
        if str(value) not in shipped.KNOWN and place.exists():
            found[name] = type(value)(place.absolute())
    log = limits.log_file
    if log is not None and log != Path("-"):
        limits = replace(limits, log_file=log.absolute())
    return found, limits


def ray_asked(asked: bool, counts: dict[str, Any]) -> bool:
    """Whether replicas are wanted; their options are refused where they are not."""
    given = [name for name, value in counts.items() if value is not None]
    if given and not asked:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} was passed without --ray.",
            "without a Ray cluster there is one server in one process.",
            "pass --ray, too, or leave it out.",
        )
    return asked


def greeting(session: Session, limits: Settings, address: str) -> list[str]:
    """Where the server is, what it serves, and what it allows."""
    most = limits.max_tokens_limit or session.target.max_length or "any number of"
    timeout = "no timeout" if limits.request_timeout is None else f"{limits.request_timeout:g} s"
    keys = f"{len(limits.api_keys)} API keys" if limits.api_keys else "no API key needed"
    return [
        f"foretoken serves {limits.model_name} at {address}/v1 (and {address}/ for people)",
        f"  method  {session.method}, {session.engine.promise}",
        f"  limits  {session.max_rows} texts at once, {limits.queue} wait; {most} tokens; bodies "
        f"of {limits.max_body} bytes; {timeout}; {keys}",
        f"  cache   {limits.prefix_cache} bytes for prefixes; Ctrl-C stops within "
        f"{limits.grace:g} s",
    ]


def name_of(target: str | None, tuned: Path | None) -> str:
    """What a model is called where no name is passed: the end of its path, or its hub name."""
    if target is None:
        if tuned is None:
            return "foretoken"
        place = tuned.resolve()
        return place.name if place.is_dir() else place.parent.name
    return Path(target).resolve().name if Path(target).is_dir() else target


def keys(listed: str) -> list[str]:
    """Keys of the environment, between commas; ConfigError where it is set and holds none."""
    found = [key.strip() for key in listed.split(",") if key.strip()]
    if listed and not found:  # somebody meant to keep others out
        raise ConfigError(
            f"{KEY} is set, and holds no key.",
            "it holds keys between commas; without any, everybody may ask.",
            f"write a key into {KEY}, or unset it.",
        )
    return found


def size(option: str, text: str) -> int:
    """A number of bytes, such as 4MiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    units = {name.lower(): factor for name, factor in UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise ConfigError(
            f"{option} {text} was passed.",
            "a size is a number of bytes, with KiB, MiB or GiB where it is large.",
            f"write for example {option} 4MiB.",
        )
    return int(float(found[1]) * units[found[2].lower()])
