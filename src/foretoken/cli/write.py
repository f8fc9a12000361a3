"""`foretoken generate` and `foretoken chat`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli.app import app
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.engine.record import Stats
    from foretoken.engine.session import Result, Session


BEAM_FIELDS = ("sequences", "scores", "texts", "finish_reasons")


@app.command(
    epilog="Example: `foretoken generate 'Once upon a time' --target ./llama --draft ./small`"
)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    method: o.MethodName = None,
    set_: o.Settings = None,
    max_new_tokens: o.MaxNewTokens = 256,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    stop: o.Stop = None,
    seed: o.Seed = None,
    show: Annotated[
        bool, typer.Option("--show", help="Colour what was guessed and what was corrected.")
    ] = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    exact_bits: o.ExactBits = False,
    allow_pickle: o.AllowPickle = False,
    trust_remote_code: o.TrustRemoteCode = False,
    json_: o.AsJson = False,
) -> None:
    """Continue a text."""
    text = read_prompt(prompt, file)
    session = o.open_session(
        target=target,
        draft=draft,
        method=method,
        given=set_,
        quiet=json_,
        device=device,
        dtype=dtype,
        exact_bits=exact_bits,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    sampling = o.sampling(
        stop,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    if session.writes == "beams":
        write_beams(session, text, sampling, show, json_)
        return
    if json_:
        o.print_json(as_document(session.generate(text, **sampling), session.method))
        session.save()
        return
    from foretoken.cli.colour import consoles, legend, paint

    out, err = consoles()
    if show:
        out.print(legend(session.method))
    result = paint(session, text, sampling, out, show)
    err.print(summary(result.stats), style="dim")
    session.save()


def write_beams(
    session: Session, text: str, sampling: dict[str, Any], show: bool, json_: bool
) -> None:
    """All texts with their scores, the best first."""
    if show:
        raise ConfigError(
            f"--show was passed with method {session.method!r}.",
            "colours tell where the tokens of one text come from; beams are several.",
            "leave --show out, or use a method that writes one text.",
        )
    result = session.generate(text, **sampling)
    stats = result.stats
    if json_:
        document = {name: getattr(result, name) for name in BEAM_FIELDS}
        o.print_json({"method": session.method, **document, "stats": stats.to_dict()})
        return
    from foretoken.cli.colour import consoles

    out, err = consoles()
    for score, tokens, told in zip(result.scores, result.sequences, result.texts, strict=True):
        err.print(f"[{score:.3f}]", style="dim", markup=False)
        out.print(told or " ".join(map(str, tokens)), markup=False)
    err.print(
        f"{len(result.scores)} texts, {stats.grown} tokens deep in {stats.seconds:.2f} s; "
        f"{stats.target_forwards} target steps, {stats.mean_accepted_length:.2f} tokens per step, "
        f"{stats.mean_width:.2f} beams per token",
        style="dim",
    )


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file or a pipe."""
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(
                f"a prompt from {file}.",
                f"the file cannot be read as UTF-8 text ({type(problem).__name__}).",
                "pass a text file that exists.",
            ) from problem
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        return sys.stdin.read()
    if prompt is None:
        raise ConfigError(
            "generate was called without a prompt.",
            "a prompt comes as an argument, from --file, or from a pipe.",
            "write for example: foretoken generate 'Once upon a time'.",
        )
    return prompt


def as_document(result: Result, method: str) -> dict[str, Any]:
    """A result as plain values."""
    return {
        "method": method,
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_dict(),
    }


def summary(stats: Stats) -> str:
    """One line of statistics."""
    line = (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s, {stats.tokens_per_second:.1f} tokens/s; "
        f"{stats.target_steps} target steps, {stats.mean_accepted_length:.2f} tokens per step"
    )
    if stats.drafted:
        line += f"; {stats.accepted} of {stats.drafted} guesses accepted"
    return line


@app.command(epilog="Example: `foretoken chat --target ./model --draft ./small --temperature 0.7`")
def chat(
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    method: o.MethodName = None,
    set_: o.Settings = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: o.MaxNewTokens = 512,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    seed: o.Seed = None,
    show: Annotated[
        bool, typer.Option("--show", help="Colour what was guessed and what was corrected.")
    ] = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    exact_bits: o.ExactBits = False,
    allow_pickle: o.AllowPickle = False,
    trust_remote_code: o.TrustRemoteCode = False,
) -> None:
    """Talk to a model. An empty line or end of input leaves."""
    session = o.open_session(
        target=target,
        draft=draft,
        method=method,
        given=set_,
        device=device,
        dtype=dtype,
        exact_bits=exact_bits,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    sampling = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    from foretoken.cli.colour import consoles, legend

    out, err = consoles()
    if show:
        out.print(legend(session.method))
    messages = [] if system is None else [{"role": "system", "content": system}]
    try:
        converse(session, messages, sampling, (out, err), show)
    finally:
        session.save()


def converse(
    session: Session,
    messages: list[dict[str, str]],
    sampling: dict[str, Any],
    screens: tuple[Console, Console],
    show: bool,
) -> None:
    """Read a line, answer it, until the user has nothing more to say."""
    from foretoken.cli.colour import paint

    out, err = screens
    while True:
        try:
            said = out.input("[bold]you[/bold] ")
        except EOFError:
            return
        if not said.strip():
            return
        messages.append({"role": "user", "content": said})
        prompt, stop = conversation(session.tokenizer, messages)
        result = paint(session, prompt, {**sampling, "stop": stop}, out, show)
        messages.append({"role": "assistant", "content": result.text.strip()})
        err.print(summary(result.stats), style="dim")


def conversation(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[Any, list[str] | None]:
    """The prompt of a conversation, and the stop text it needs where no end token is trained.

    Token ids from the tokenizer's chat template; without one, the frame the minis learned.
    """
    if getattr(tokenizer, "chat_template", None):
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        return list(ids), None
    from foretoken.minis.example import frame

    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return frame("dialogue", "\n".join(lines)), ["\nUser:", "\n### "]
