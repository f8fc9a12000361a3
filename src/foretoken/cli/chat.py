"""`foretoken chat`: a conversation in a terminal."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli.app import app
from foretoken.cli.errors import out_of_memory, tell
from foretoken.cli.logs import quiet
from foretoken.cli.write import figures, remark, tell_unused
from foretoken.errors import ConfigError, ForetokenError
from foretoken.methods import method as method_row

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.engine.results import Result
    from foretoken.engine.session import Session

HELP = """/help   these lines
/reset  forget the conversation (the system message stays)
/exit   leave; so does the end of input (Ctrl-D)
Ctrl-C  ends the answer that is being written, and keeps what is there"""


@app.command(epilog="Example: `foretoken chat --target ./model --draft ./small --temperature 0.7`")
def chat(
    context: typer.Context,
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    draft_vocabulary: o.DraftVocabulary = None,
    method: o.MethodName = None,
    set_: o.Settings = None,
    tuned: o.TunedFile = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most.")] = 512,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    frequency_penalty: o.FrequencyPenalty = None,
    seed: o.Seed = None,
    no_generation_config: o.NoGenerationConfig = False,
    show: o.Show = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    exact_bits: o.ExactBits = False,
    allow_pickle: o.AllowPickle = False,
    trust_remote_code: o.TrustRemoteCode = False,
) -> None:
    """Talk to a model.

    Ctrl-C ends the answer that is being written; /reset starts over, /exit leaves, /help tells
    more. Each answer says what it took and whether it follows the target's own law.

    Options left out follow the model's generation config (generation_config.json), as in
    transformers' generate; --no-generation-config leaves it aside.
    """
    refuse_beams(method)
    sampling = o.sampling(
        None,
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
    session = o.open_session(
        target=o.named_target(context, target, tuned),
        draft=draft,
        draft_vocabulary=draft_vocabulary,
        method=method,
        given=set_,
        tuned=tuned,
        device=device,
        dtype=dtype,
        exact_bits=exact_bits,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        no_generation_config=no_generation_config,
    )
    from foretoken.cli.colour import consoles

    prepare_input()
    try:
        Chat(session, sampling, consoles(), show, system).run()
    finally:
        session.save()


def refuse_beams(method: str | None) -> None:
    """A chat needs one text per prompt."""
    if method is not None and method_row(method).writes != "text":
        raise ConfigError(
            f"a chat with method {method!r} was asked for.",
            "this method writes several scored texts per prompt; a chat needs one.",
            "use a method that writes one text, such as chain.",
        )


def prepare_input() -> None:
    """Let `input` take what a user types or pastes.

    Bytes that are no UTF-8 come as halves of characters, for which their line alone is refused. An
    editor of lines reads those that a terminal by itself cuts at 4095 bytes, and knows arrow keys.
    """
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
        if sys.stdin.isatty():
            with suppress(ImportError):  # where Python was built without one
                import_module("readline")


class Chat:
    """A conversation: what was said so far, and the screen it is held on."""

    def __init__(
        self,
        session: Session,
        sampling: dict[str, Any],
        screens: tuple[Console, Console],
        show: bool,
        system: str | None = None,
    ) -> None:
        self.session, self.sampling, self.show = session, sampling, show
        self.out, self.err = screens
        self.begin = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.begin)

    def run(self) -> None:
        """Read a line and answer it, until the user leaves."""
        self.greet()
        while (said := self.read()) is not None:
            if said.startswith("/") and " " not in said and "/" not in said[1:]:
                if not self.command(said):
                    return
            elif said:
                self.answer(said)

    def greet(self) -> None:
        """Who answers, and how to leave."""
        from foretoken.cli.colour import legend

        if self.show:
            self.out.print(legend(self.session.method, self.out))
        promise = self.session.engine.promise
        if not quiet() or not promise.lossless:
            self.err.print(
                f"{self.session.method}, {promise}. /help for help, /exit to leave.", style="dim"
            )
        if not quiet() and not getattr(self.session.tokenizer, "chat_template", None):
            self.err.print(
                "its tokenizer has no chat template: what is said is told in lines, "
                "User: and Assistant:",
                style="dim",
            )
        tell_unused(self.err, self.session, self.sampling)

    def read(self) -> str | None:
        """What the user says, without the blanks around it; None at the end of input."""
        while True:
            try:
                return input("you " if self.out.is_terminal else "").strip()
            except EOFError:
                return None
            except KeyboardInterrupt:  # nothing is being written: only the line is dropped
                self.err.print("\n(/exit or Ctrl-D leaves)", style="dim")

    def command(self, name: str) -> bool:
        """Do what a command says; whether the chat goes on."""
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/reset":
            self.messages = list(self.begin)
            self.err.print("the conversation starts over", style="dim")
        elif name == "/help":
            self.err.print(HELP, markup=False)
        else:
            self.err.print(f"there is no command {name}; these are there:\n{HELP}", markup=False)
        return True

    def answer(self, said: str) -> None:
        """The model's answer to a line; a line that cannot be answered is taken back."""
        from foretoken.cli.colour import paint

        self.messages.append({"role": "user", "content": said})
        try:
            prompt, stop = conversation(self.session.tokenizer, self.messages)
            with interruptible() as stopped:
                result = paint(
                    self.session,
                    prompt,
                    {**self.sampling, "stop": stop},
                    self.out,
                    self.show,
                    stopped.is_set,
                )
        except (ForetokenError, MemoryError, RuntimeError) as error:
            told = error if isinstance(error, ForetokenError) else out_of_memory(error, "this line")
            if told is None:
                raise
            self.messages.pop()
            tell(told)
            self.err.print("that line was left out; /reset makes room for another", style="dim")
            return
        self.keep(result, stopped.is_set())

    def keep(self, result: Result, stopped: bool) -> None:
        """Remember the answer and tell what it took."""
        text = result.text.strip()
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()  # a conversation goes on with the other side's turn
        line = figures(result)
        remark(self.err, f"(stopped) {line}" if stopped else line, self.session.engine.promise)


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that a step ends whole; a second one interrupts at once."""
    stopped = threading.Event()

    def note(number: int, frame: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def conversation(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[Any, list[str] | None]:
    """The prompt of a conversation, and the stop text it needs where no end of a turn is trained.

    Token ids from the tokenizer's chat template; a base model, which has none, gets lines that
    begin with who speaks.
    """
    if getattr(tokenizer, "chat_template", None):
        from foretoken.engine.chat import chat_ids

        return chat_ids(messages, tokenizer), None
    lines = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
    return "".join(lines) + "Assistant:", ["\nUser:", "\nSystem:"]
