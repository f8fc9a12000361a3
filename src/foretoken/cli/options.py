"""Options that several commands share, and what they mean: models, methods, settings."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken import shipped
from foretoken.cli.errors import print_json as print_json
from foretoken.cli.logs import stage
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.engine.session import Session

LOG = logging.getLogger(__name__)
DEFAULT_TARGET, DEFAULT_DRAFT = "text-target", "text-draft"
# What has an option of its own where a model is loaded, and is no field of a method.
RESERVED = ("target", "method", "draft", "device", "dtype", "tokenizer", "tuned")

Target = Annotated[
    str,
    typer.Option(
        help="Model directory, hub name, or a name of `foretoken minis list`.", show_default=True
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(help="Draft model, likewise; the shipped target has the shipped draft."),
]
DraftVocabulary = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Tokens that the draft scores, see `foretoken vocabulary`; off: all of them.",
    ),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="See `foretoken methods`. Default: what a draft_head was trained for, else auto-draft "
        "with a draft, else auto.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="An option of the method, see `foretoken methods NAME`; repeatable.",
    ),
]
TunedFile = Annotated[
    Path | None,
    typer.Option(
        "--tuned",
        help="What `foretoken tune` found, tuned.json or its folder; other options win.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1 ...; default: cuda where there is one, else cpu."),
]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16, float16; default: float32 on a CPU.")
]
ExactBits = Annotated[
    bool, typer.Option("--exact-bits", help="Bit for bit what one-token decoding writes.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Load .bin weights, which can run code.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run model code from the checkpoint.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(help="Tokens to write at most; else the generation config's cap, or 256."),
]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this mass.")]
MinP = Annotated[
    float | None, typer.Option(help="Keep tokens this likely relative to the likeliest.")
]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 discourages repeating.")]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Subtracted once from tokens written before.")
]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Subtracted per earlier use.")]
NoGenerationConfig = Annotated[
    bool,
    typer.Option("--no-generation-config", help="Leave generation_config.json of the model aside."),
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text; \\n is a newline; repeatable.")
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
GuidedJson = Annotated[
    Path | None, typer.Option(help="Write JSON that a schema allows: a file of it.")
]
GuidedRegex = Annotated[
    str | None, typer.Option(help="Write a text that matches a regular expression as a whole.")
]
PredictionFile = Annotated[
    Path | None,
    typer.Option(
        "--prediction", help="A file of text that the answer is expected to be close to: a draft."
    ),
]
Show = Annotated[
    bool,
    typer.Option(
        "--show", help="Mark what was guessed and what was corrected; signs where no colour is."
    ),
]


def source(name: str) -> Any:
    """Where a model is: the folder of a shipped or fetched one, or the name as it stands."""
    return shipped.resolve(name)


def pair(target: str, draft: str | None) -> tuple[str | Path, str | Path | None]:
    """Target and draft as given; the shipped target comes with the shipped draft."""
    if draft is None and target == DEFAULT_TARGET:
        draft = DEFAULT_DRAFT
    return source(target), None if draft is None else source(draft)


def only_toys(target: str, data: Path | None) -> bool:
    """Whether the only prompts there are were made for the shipped minis, and not for this target:
    what it writes after them is not what it will be asked for."""
    return data is None and target != DEFAULT_TARGET


def named_target(context: typer.Context, target: str, tuned: Path | None) -> str | None:
    """The target that was passed, or the default one; None where a tuned file names it."""
    source = context.get_parameter_source("target")
    left_out = source is None or source.name == "DEFAULT"
    return None if tuned is not None and left_out else target


FIELDS = {  # of an option: whose they are, one of them, and what lists them
    "--set": ("the method's config", "depth=4", "`foretoken methods NAME`"),
    "--learn-set": ("how a draft learns", "passes=4", "docs/serving.md"),
}


def settings(
    given: list[str] | None,
    option: str = "--set",
    taken: tuple[str, ...] = RESERVED,
    fields: tuple[str, str, str] | None = None,
) -> dict[str, Any]:
    """`key=value` pairs with numbers, truth values and shapes read as such.

    Keys of `taken` are refused; `fields` says what the others are, as a row of FIELDS does.
    """
    of, example, lists = fields or FIELDS.get(option, FIELDS["--set"])
    found: dict[str, Any] = {}
    for item in given or []:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or key in taken:
            raise ConfigError(
                f"{option} {item} was passed.",
                f"{option} takes key=value, where key is a field of {of}.",
                f"write for example {option} {example}; {lists} lists the fields, and models and "
                "devices have options of their own.",
            )
        if key in found:
            raise ConfigError(
                f"{option} {key}=... was passed twice.",
                "a field has one value.",
                f"pass {option} {key}=... once; a shape is written {key}=2x4x4 or {key}=2,4,4.",
            )
        found[key] = setting(value)
    return found


def setting(text: str) -> Any:
    """The value of a setting: as in the rows of a bench, and lists between commas or x."""
    from foretoken.bench.rows import value_of

    if re.fullmatch(r"[^,]+(,[^,]+)+,?|\d+,", text):
        return tuple(value_of(part.strip()) for part in text.rstrip(",").split(","))
    return value_of(text)


def open_session(*, quiet: bool = False, **options: Any) -> Session:
    """The session the options describe, with a sign of life while weights are read."""
    loading = to_load(**options)
    from foretoken.engine.loading import load

    with stage(f"loading {options['target'] or options.get('tuned')}", quiet):
        session = load(**loading)
        session.prepare()
    tell_unread(options.get("draft"), session.method)
    return session


def tell_unread(draft: str | None, method: str) -> None:
    """Say that the draft that was passed is not read, whatever it was that chose the method.

    The shipped draft of the shipped target was not passed: whoever looks up asked for no draft.
    """
    from foretoken.methods import method as method_row
    from foretoken.methods import needs_draft

    if draft is not None and not needs_draft(method_row(method)):
        LOG.warning("--draft %s is not read: method %s takes no draft model; leave it out, or use "
                    "a method that takes one, such as --method chain", draft, method)  # fmt: skip


def to_load(
    *,
    target: str | None,
    draft: str | None,
    method: str | None,
    given: list[str] | None,
    no_generation_config: bool = False,
    tuned: Path | None = None,
    **loading: Any,
) -> dict[str, Any]:
    """What the options say to `load`; no model is read.

    What a tuned file says of a target stands where none is passed.
    """
    from foretoken.methods import method as method_row

    config = settings(given)
    if method is not None:
        method_row(method)  # an unknown name is refused before torch is imported
    # The shipped draft comes with the shipped target, but not beside a file that names its own.
    alone = target is None or tuned is not None
    whole, small = (target, draft) if alone else pair(target, draft)
    asked = {"target": whole, "method": method, "draft": small, "tuned": tuned}
    # What has a flag of its own may be set either way, as in Python.
    plain = {"generation_config": False if no_generation_config else None}
    check_said_once(loading, config)
    return {**loading, **plain, **config, **asked}


def check_said_once(flags: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """ConfigError for a flag and a --set of one thing that say two things.

    A flag that was left out is None or, of those without a value, False.
    """
    for name, value in flags.items():
        left_out = value is None or value is False
        if left_out or name not in config or setting(str(value)) == config[name]:
            continue
        flag = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        raise ConfigError(
            f"{flag} and --set {name}={spelt(config[name])} were passed.",
            "one thing was said twice, and not alike.",
            "leave one of the two out.",
        )


def spelt(value: Any) -> str:
    """A value as --set takes it."""
    if isinstance(value, tuple):
        return ",".join(map(spelt, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def sampling(stop: list[str] | None, **options: Any) -> dict[str, Any]:
    """Checked sampling options that were given; the others follow the model's generation config.

    A shell cannot type a newline, so \\n stands for one.
    """
    from foretoken.sampling import SamplingParams

    texts = tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in stop or ())
    given = {name: value for name, value in options.items() if value is not None}
    SamplingParams(**given, stop=texts)
    return {**given, "stop": texts or None}
