"""`foretoken generate`: one prompt, from an argument, a file, a pipe or chat messages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli.app import app
from foretoken.cli.logs import hushed, quiet
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.engine.promise import Promise
    from foretoken.engine.results import Result
    from foretoken.engine.session import Session


@app.command(
    epilog="Example: `foretoken generate 'Once upon a time' --target ./llama --draft ./small`"
)
def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads stdin.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a text file in UTF-8.")
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(help='Chat as the prompt: a JSON file, [{"role": "user", "content": ...}].'),
    ] = None,
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    draft_vocabulary: o.DraftVocabulary = None,
    method: o.MethodName = None,
    set_: o.Settings = None,
    tuned: o.TunedFile = None,
    max_new_tokens: o.MaxNewTokens = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    frequency_penalty: o.FrequencyPenalty = None,
    stop: o.Stop = None,
    seed: o.Seed = None,
    guided_json: o.GuidedJson = None,
    guided_regex: o.GuidedRegex = None,
    prediction: o.PredictionFile = None,
    no_generation_config: o.NoGenerationConfig = False,
    show: o.Show = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    exact_bits: o.ExactBits = False,
    allow_pickle: o.AllowPickle = False,
    trust_remote_code: o.TrustRemoteCode = False,
    json_: o.AsJson = False,
) -> None:
    """Continue a text, or answer chat messages.

    Says at the end what it took, and whether the text follows the target's own law; --json holds
    the same.

    Options left out follow the model's generation config (generation_config.json), as in
    transformers' generate; --no-generation-config leaves it aside.
    """
    check_colours(method, show, json_)
    text = read_prompt(prompt, file, messages)
    sampling = o.sampling(
        stop,
        max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
        top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
    ) | foretold(guided_json, guided_regex, prediction)  # fmt: skip
    session = o.open_session(
        target=o.named_target(context, target, tuned),
        draft=draft,
        draft_vocabulary=draft_vocabulary,
        method=method,
        given=set_,
        tuned=tuned,
        quiet=hushed(json_),
        device=device,
        dtype=dtype,
        exact_bits=exact_bits,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        no_generation_config=no_generation_config,
    )
    if messages is not None:
        from foretoken.engine.chat import chat_ids

        text = chat_ids(text, session.tokenizer)
    if session.writes == "beams":
        write_beams(session, text, sampling, show, json_)
    elif json_:
        o.print_json(as_document(session.generate(text, **sampling), session))
    else:
        write_text(session, text, sampling, show)
    session.save()


def write_text(session: Session, prompt: Any, sampling: dict[str, Any], show: bool) -> None:
    """The text as it comes, and what it took."""
    from foretoken.cli.colour import consoles, legend, paint

    out, err = consoles()
    tell_unused(err, session, sampling)
    if show:
        out.print(legend(session.method, out))
    result = paint(session, prompt, sampling, out, show)
    remark(err, figures(result), session.engine.promise)


def tell_unused(err: Console, session: Session, sampling: dict[str, Any]) -> None:
    """Say which options do nothing, since no token is drawn."""
    drawn = sampling.get("temperature")
    if drawn or (drawn is None and session.generation is not None and session.generation.samples):
        return
    named = [name for name in ("top_k", "top_p", "min_p", "seed") if sampling.get(name) is not None]
    if named and not quiet():
        flags = ", ".join("--" + name.replace("_", "-") for name in named)
        err.print(f"greedy text: {flags} change nothing; --temperature 1 samples", style="dim")


def figures(result: Result) -> str:
    """What a text took, and why it ended."""
    return f"{result.stats}; finish_reason {result.finish_reason}"


def remark(err: Console, line: str, promise: Promise) -> None:
    """A line of figures with the promise behind it; a broken law is said even when quiet."""
    if promise.lossless and not quiet():
        err.print(f"{line}; {promise}", style="dim", markup=False)
    elif not promise.lossless:
        if not quiet():
            err.print(line, style="dim", markup=False)
        err.print(str(promise), style="bold", markup=False)


def check_colours(name: str | None, show: bool, json_: bool = False) -> None:
    """ConfigError for colours in a document, or of a method that writes several texts."""
    from foretoken.methods import method

    if show and json_:
        raise ConfigError(
            "--show was passed with --json.",
            "a document has no colours; its figures say how much was guessed.",
            "leave one of them out.",
        )
    if show and name is not None and method(name).writes == "beams":
        raise ConfigError(
            f"--show was passed with method {name!r}.",
            "colours tell where the tokens of one text come from; beams are several.",
            "leave --show out, or use a method that writes one text.",
        )


def write_beams(
    session: Session, text: Any, sampling: dict[str, Any], show: bool, json_: bool
) -> None:
    """All texts with their scores, the best first."""
    check_colours(session.method, show)  # one that a tuned file names
    result = session.generate(text, **sampling)
    stats = result.stats
    if json_:
        o.print_json({"method": session.method, **result.to_dict()})
        return
    from rich.segment import Segment

    from foretoken.cli.colour import consoles, write

    out, err = consoles()
    for score, tokens, told in zip(result.scores, result.sequences, result.texts, strict=True):
        err.print(f"[{score:.3f}]", style="dim", markup=False)
        write(out, Segment(told or " ".join(map(str, tokens))), Segment("\n"))
    line = (
        f"{len(result.scores)} texts, {stats.grown} tokens deep in {stats.seconds:.2f} s; "
        f"{stats.target_forwards} target steps, {stats.mean_accepted_length:.2f} tokens per step, "
        f"{stats.mean_width:.2f} beams per token"
    )
    remark(err, line, session.engine.promise)


def read_prompt(prompt: str | None, file: Path | None, messages: Path | None) -> Any:
    """The prompt from an argument, a file or a pipe; from a file of messages, the messages."""
    one_source(prompt, file, messages)
    if messages is not None:
        return read_messages(messages)
    if file is not None:
        text = read_text(file)
    elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        text = decoded(sys.stdin.buffer.read(), "-")
    else:
        text = prompt or ""
    if not text:
        raise ConfigError(
            "generate was called without a prompt, or with one that is empty.",
            "a prompt comes as an argument, from --file or --messages, or from a pipe.",
            "write for example: foretoken generate 'Once upon a time'.",
        )
    from foretoken.engine.text import check_text

    check_text(text, "the prompt")
    return text


def foretold(schema: Path | None, regex: str | None, prediction: Path | None) -> dict[str, Any]:
    """What the text has to match, and what it is expected to be close to, where that was said."""
    guided = {
        "json": None if schema is None else read_text(schema, "a JSON schema"),
        "regex": regex,
    }
    said = {
        "guided": guided if any(value is not None for value in guided.values()) else None,
        "prediction": None if prediction is None else read_text(prediction, "a prediction"),
    }
    return {name: value for name, value in said.items() if value is not None}


def one_source(prompt: str | None, file: Path | None, messages: Path | None) -> None:
    """Refuse prompts from two places."""
    given = {"a prompt": prompt, "--file": file, "--messages": messages}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(
            f"{' and '.join(named)} were passed together.",
            "generate writes after one prompt.",
            f"pass {' or '.join(named)}, and put everything the model is to read in there.",
        )


def read_text(file: Path, what: str = "a prompt") -> str:
    """The text of a file in UTF-8; any other file is refused with what it is."""
    try:
        found = file.read_bytes()
    except OSError as problem:
        raise ConfigError(
            f"{what} from {file}.",
            f"the file cannot be read: {problem.strerror}.",
            "pass a text file that exists.",
        ) from problem
    return decoded(found, str(file), what)


def decoded(found: bytes, place: str, what: str = "a prompt") -> str:
    """The text of bytes in UTF-8, lines ended as in Python; others are refused by what they are."""
    try:
        return found.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as problem:
        byte = f"byte {problem.start} is 0x{found[problem.start]:02x}"
        if found.startswith((b"\xff\xfe", b"\xfe\xff")):
            kind, name = "looks like UTF-16 text", "UTF-16"
        elif b"\0" in found:
            raise ConfigError(
                f"{what} from {place}.",
                f"it is binary, no text ({byte}).",
                "pass a text in UTF-8.",
            ) from problem
        else:
            kind, name = f"looks like Latin-1 (Windows) text: {byte}", "LATIN1"
        raise ConfigError(
            f"{what} from {place}.",
            f"it is no UTF-8 text; it {kind}.",
            f"convert it: iconv -f {name} -t UTF-8 {place} > text.txt, and pass that.",
        ) from problem


def read_messages(file: Path) -> Any:
    """The messages of a JSON file: a list, or an object that holds one as "messages"."""
    from foretoken.engine.chat import check_chat

    try:
        found = json.loads(read_text(file))
    except ValueError as problem:
        raise ConfigError(
            f"chat messages from {file}.",
            f"the file is no JSON: {problem}.",
            'write for example [{"role": "user", "content": "Hello"}].',
        ) from problem
    return check_chat(
        found["messages"] if isinstance(found, dict) and "messages" in found else found
    )


def as_document(result: Result, session: Session) -> dict[str, Any]:
    """A result as plain values, with what the session promises about it."""
    return {
        "method": session.method,
        **session.engine.promise.to_dict(),
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_dict(),
    }
