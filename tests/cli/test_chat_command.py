"""A conversation in a terminal: its commands, Ctrl-C, and messages as a prompt."""

import copy
import json
import os
import signal
import threading

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import foretoken
from foretoken import shipped
from foretoken.audit.fixtures import random_head
from foretoken.cli import app
from foretoken.cli.chat import Chat, conversation, interruptible
from foretoken.cli.colour import consoles
from foretoken.engine.chat import chat_ids, is_chat
from foretoken.errors import ConfigError

runner = CliRunner()
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def flags(pair_folders):
    target, draft = map(str, pair_folders)
    return ["--target", target, "--draft", draft, "--set", "kernels=dense"]


@pytest.fixture
def talk(pair_folders):
    spec = foretoken.load(pair_folders[0], draft=pair_folders[1], kernels="dense")
    return Chat(spec, {"max_new_tokens": 6}, consoles(), show=False, system="be brief")


def test_chat_answers_until_it_is_told_to_leave(flags):
    said = "hello\n\nagain\n/exit\nnever read\n"
    ran = runner.invoke(app, ["chat", *flags, "--max-new-tokens", "5"], input=said)
    assert ran.exit_code == 0, ran.output
    assert ran.stderr.count("tokens in") == 2, "an empty line is no message and no farewell"
    assert "lossless" in ran.stderr


def test_a_line_of_bytes_that_are_no_text_is_refused_and_the_chat_goes_on(flags):
    said = b"caf\xe9\nhello\n/exit\n"
    ran = runner.invoke(app, ["chat", *flags, "--max-new-tokens", "5"], input=said)
    assert ran.exit_code == 0, ran.output
    assert "no character" in ran.stderr and "that line was left out" in ran.stderr
    assert ran.stderr.count("tokens in") == 1


def test_the_prompt_is_given_to_the_editor_of_lines(talk, monkeypatch):
    """It would count the columns wrong behind a prompt that it does not know."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or " hi ")
    talk.out = Console(force_terminal=True)
    assert talk.read() == "hi" and asked == ["you "]


def test_reset_forgets_all_but_the_system_message(talk):
    talk.answer("hello")
    assert [message["role"] for message in talk.messages][:2] == ["system", "user"]
    assert talk.command("/reset")
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    assert not talk.command("/exit")


def test_help_and_unknown_commands_list_what_there_is(talk, capsys):
    assert talk.command("/help") and talk.command("/rset")
    told = capsys.readouterr().err
    assert told.count("/reset") == 2 and "there is no command /rset" in told


def test_a_path_is_a_message_and_no_command(flags):
    said = "/usr/bin is a folder\n"
    ran = runner.invoke(app, ["chat", *flags, "--max-new-tokens", "3"], input=said)
    assert ran.stderr.count("tokens in") == 1


def test_a_line_that_does_not_fit_is_taken_back_and_the_chat_goes_on(talk, capsys):
    before = list(talk.messages)
    talk.answer("cat " * 400)
    assert talk.messages == before
    assert "context of this model is 512 tokens" in capsys.readouterr().err
    talk.answer("cat")
    assert len(talk.messages) >= len(before)


def test_an_interrupt_ends_the_answer_and_keeps_what_is_there(talk, capsys):
    talk.sampling["max_new_tokens"] = 400
    stream = talk.session.stream
    steps = []

    def interrupted(*given, **options):
        pieces = stream(*given, **options)
        following = pieces.__next__

        def one():
            steps.append(1)
            if len(steps) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return following()

        class Pieces:
            result = property(lambda self: pieces.result)
            close = staticmethod(pieces.close)

            def __iter__(self):
                return iter(one, None)

        return Pieces()

    talk.session.stream = interrupted
    talk.answer("hello")
    told = capsys.readouterr()
    assert len(steps) == 3 and "(stopped)" in told.err
    talk.session.stream = stream
    talk.sampling["max_new_tokens"] = 4
    talk.answer("again")
    assert "(stopped)" not in capsys.readouterr().err


def test_a_second_interrupt_is_not_held_back():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert isinstance(stopped, threading.Event) and stopped.is_set()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def templated(byte_tokenizer):
    words = copy.deepcopy(byte_tokenizer)
    words.chat_template = (
        "{% for m in messages %}{% if m.role == 'pope' %}{{ raise_exception('no popes') }}"
        "{% endif %}<turn>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    return words


def test_messages_go_through_the_chat_template(templated):
    assert templated.decode(chat_ids(HELLO, templated)) == "<turn>hi>"
    begun = [*HELLO, {"role": "assistant", "content": "well"}]
    assert templated.decode(chat_ids(begun, templated)) == "<turn>hi<turn>well"
    assert conversation(templated, HELLO) == (chat_ids(HELLO, templated), None)


def test_a_base_model_gets_lines_that_begin_with_who_speaks(byte_tokenizer):
    prompt, stop = conversation(byte_tokenizer, HELLO)
    assert prompt == "User: hi\nAssistant:" and "\nUser:" in stop


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "without messages"),
        ("hi", "a str was passed"),
        ([{"role": "user"}], "message 0 of a chat has the fields role"),
        ([*HELLO, {"role": "assistant", "content": ""}], "message 1"),
        ([{"role": "pope", "content": "hi"}], "no popes"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(templated, messages, told):
    with pytest.raises(ConfigError, match=told):
        chat_ids(messages, templated)


def test_messages_need_a_chat_template(byte_tokenizer):
    for words, told in ((byte_tokenizer, "without a chat template"), (None, "no tokenizer")):
        with pytest.raises(ConfigError, match=told):
            chat_ids(HELLO, words)


def test_a_chat_is_told_from_a_batch():
    assert is_chat(HELLO)
    assert not any(map(is_chat, ("hi", [], ["hi"], [1, 2], [[1], [2]], [HELLO])))


def test_the_shipped_models_read_messages_in_the_frame_they_learned():
    from foretoken.lm.load import load_tokenizer
    from foretoken.minis.example import frame
    from foretoken.minis.vocabulary import CHAT

    for name in shipped.NAMES:
        words = load_tokenizer(name)
        assert words.chat_template == CHAT
        ids = chat_ids([*HELLO, {"role": "assistant", "content": "ho"}, *HELLO], words)
        assert ids == words(frame("dialogue", "User: hi\nAssistant: ho\nUser: hi"))["input_ids"]


def test_generate_answers_a_file_of_messages(tmp_path):
    file = tmp_path / "chat.json"
    how = ["generate", "--method", "plain", "--set", "kernels=dense", "--max-new-tokens", "8"]
    how.append("--json")
    texts = []
    for document in (HELLO, {"messages": HELLO}):
        file.write_text(json.dumps(document))
        ran = runner.invoke(app, [*how, "--messages", str(file)])
        assert ran.exit_code == 0, ran.output
        texts.append(json.loads(ran.stdout)["tokens"])
    frame = "### Task: dialogue\nUser: hi\n### Answer:\n"
    ran = runner.invoke(app, [*how, frame])
    assert texts == [json.loads(ran.stdout)["tokens"]] * 2


def test_beams_are_refused_before_anything_is_loaded():
    ran = runner.invoke(app, ["chat", "--target", "./none", "--method", "dsbd"])
    assert ran.exit_code == 2 and "such as chain" in ran.stderr


def test_only_the_last_message_has_to_say_something(templated):
    """A system prompt or an answer may have been empty, and is part of the history then."""
    talk = [{"role": "system", "content": ""}, *HELLO, {"role": "assistant", "content": ""}, *HELLO]
    assert templated.decode(chat_ids(talk, templated)).count("<turn>hi") == 2


def test_a_line_for_which_there_is_no_memory_is_left_out_and_the_chat_goes_on(
    talk, monkeypatch, capsys
):
    def full(*_args, **_options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 99 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(type(talk.session), "stream", full)
        talk.answer("hello")
    assert "99 GiB" in capsys.readouterr().err and len(talk.messages) == 1
    talk.answer("hello")
    assert [message["role"] for message in talk.messages][1] == "user"


def test_what_greedy_text_does_not_use_is_told(flags):
    asked = ["generate", "hi", *flags, "--max-new-tokens", "3", "--top-p", "0.9", "--seed", "1"]
    told = runner.invoke(app, asked).stderr
    assert "--top-p, --seed change nothing" in told
    assert "change nothing" not in runner.invoke(app, [*asked, "--temperature", "1"]).stderr


def test_a_draft_that_the_method_does_not_read_is_told(flags, byte_tokenizer):
    asked = ["generate", "hi", *flags, "--max-new-tokens", "3"]
    head = random_head("medusa", len(byte_tokenizer), 64)
    for how, method in (
        (["--method", "suffix"], "suffix"),
        (["--set", f"draft_head={head}"], "medusa"),
    ):
        ran = runner.invoke(app, [*asked, *how])
        assert ran.exit_code == 0, ran.output
        told = f"--draft {flags[3]} is not read: method {method} takes no draft model"
        assert ran.stderr.count(told) == 1 and "--method chain" in ran.stderr, ran.stderr
    assert "is not read" not in runner.invoke(app, asked).stderr
    shipped_pair = ["generate", "hi", "--max-new-tokens", "3", "--method", "suffix"]
    ran = runner.invoke(app, shipped_pair)
    assert ran.exit_code == 0 and "is not read" not in ran.stderr, "nobody passed a draft"


def test_a_chat_without_a_template_says_how_turns_are_told(flags):
    ran = runner.invoke(app, ["chat", *flags, "--max-new-tokens", "3"], input="/exit\n")
    assert "no chat template" in ran.stderr


def test_out_of_memory_is_told_in_three_parts(flags, monkeypatch):
    def full(*_args, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(foretoken.Session, "stream", full)
    ran = runner.invoke(app, ["generate", "hi", *flags])
    assert ran.exit_code == 1 and "what to do" in ran.stderr and "smaller dtype" in ran.stderr
