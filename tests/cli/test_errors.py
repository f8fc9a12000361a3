"""What commands refuse: three parts on stderr, or one document under --json, before any work."""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from foretoken.bench.tasks import load_file
from foretoken.cli import app
from foretoken.cli.app import Commands
from foretoken.cli.load import first_of
from foretoken.cli.options import print_json
from foretoken.cli.train import prompts
from foretoken.errors import ConfigError
from foretoken.lm import load as reading
from foretoken.training.recipes import LEFT_BY_RUNS, clear

runner = CliRunner()


def run(*arguments, **more):
    return runner.invoke(app, [str(a) for a in arguments], **more)


def parts(ran, status=2):
    """The three parts a program reads."""
    assert ran.exit_code == status, ran.output
    assert ran.stderr == ""
    return json.loads(ran.stdout)["error"]


def refused(ran, *told):
    """Three parts for a reader, nothing before them: no work was begun."""
    assert ran.exit_code == 2, ran.output
    assert ran.stderr.startswith("error: ") and ran.stdout == ""
    assert "possible here: " in ran.stderr and "what to do: " in ran.stderr
    assert all(part in " ".join(ran.stderr.split()) for part in told), ran.stderr


def test_errors_are_documents_under_json():
    found = parts(run("generate", "x", "--method", "chian", "--json"))
    assert set(found) == {"asked", "possible", "do"} and "did you mean chain" in found["do"]
    found = parts(run("generate", "x", "--temprature", "1", "--json"))
    assert "--temprature" in found["asked"] and "did you mean --temperature" in found["do"]
    assert "--dtype" in parts(run("minis", "list", "--dtype", "x", "--json"))["asked"]
    assert "NAME" not in parts(run("methods", "chian", "--json"))["asked"]


def test_command_lines_that_cannot_be_understood():
    refused(run("generate", "x", "--methd", "plain"), "--methd", "did you mean --method")
    refused(run("generat", "x"), "'generat'", "did you mean generate?")
    refused(run("generate", "x", "y"), "extra argument", "generate --help")
    refused(run("generate", "x", "--top-k", "many"), "--top-k", "generate --help")
    refused(run("train", "acceptence"), "'acceptence'", "did you mean acceptance")
    refused(run("--verson"), "--verson", "did you mean --version")
    refused(run("generate", "x", "-v", "-q"), "--verbose and --quiet")


def test_where_no_name_is_close_none_is_suggested():
    found = parts(run("methods", "nosuch", "--json"))
    assert "chain" in found["possible"] and found["do"].startswith("choose one of these.")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_document_that_cannot_be_written_is_told_to_people_instead():
    command = [sys.executable, "-c", "from foretoken.cli import main; main()", "methods", "--json"]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1 and ran.stderr.startswith("error: ")
    assert "Traceback" not in ran.stderr and "No space left" in ran.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("asked", [["methods", "chain", "--json"], ["--version"]], ids=" ".join)
def test_what_is_held_back_until_the_end_is_told_to_people_too(asked):
    command = [sys.executable, "-c", "from foretoken.cli import main; main()", *asked]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1 and "what to do:" in ran.stderr, ran.stderr
    assert "Exception ignored" not in ran.stderr


def test_a_name_of_bytes_that_are_no_text_is_told_in_a_whole_document():
    found = parts(run("generate", "--file", "caf\udce9.txt", "--json"))
    assert "caf\udce9.txt" in found["asked"]


def test_one_prompt_from_one_place(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("words")
    refused(run("generate", "x", "--file", file), "a prompt and --file were passed together")
    refused(run("generate", "--messages", file, "--file", file), "--file and --messages")
    refused(run("generate", ""), "without a prompt")
    refused(run("generate", "-", input=""), "without a prompt")


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ("café".encode("latin-1"), "looks like Latin-1"),
        ("café".encode("utf-16"), "looks like UTF-16"),
        (b"\x89PNG\0\0", "is binary"),
    ],
)
def test_a_prompt_file_that_is_no_text_says_what_it_is(tmp_path, found, told):
    file = tmp_path / "prompt.txt"
    file.write_bytes(found)
    refused(run("generate", "--file", file), told)
    refused(run("generate", "-", input=found), told)
    refused(run("generate", input=found), told)


def test_an_argument_of_broken_bytes_says_so(pair_folders):
    flags = ["--target", pair_folders[0], "--set", "kernels=dense"]
    refused(run("generate", "caf\udce9", *flags), "no character, at 3")


@pytest.mark.parametrize("value", ["exact_bits=true", "allow_pickle=true", "generation_config=1"])
def test_what_has_a_flag_may_be_set_too(pair_folders, value):
    ran = run("generate", "x", "--target", pair_folders[0], "--set", value, "--max-new-tokens", 2)
    assert ran.exit_code in (0, 2), ran.output
    assert isinstance(ran.exception, SystemExit | None), ran.exception


def test_byte_order_marks_and_foreign_line_ends_are_no_part_of_a_prompt(tmp_path):
    from foretoken.cli.write import read_text

    file = tmp_path / "prompt.txt"
    file.write_bytes("café\r\nnoir\n".encode("utf-8-sig"))
    assert read_text(file) == "café\nnoir\n"


def test_messages_that_are_no_messages(tmp_path):
    file = tmp_path / "chat.json"
    for text, told in (("[1", "is no JSON"), ("[]", "without messages"), ("{}", "a chat")):
        file.write_text(text)
        refused(run("generate", "--messages", file), told)


def test_sampling_options_are_checked_before_models(tmp_path):
    refused(run("generate", "x", "--target", tmp_path / "none", "--top-p", "2"), "in (0, 1]")
    refused(run("chat", "--target", tmp_path / "none", "--top-k", "-1"), "top_k")


@pytest.fixture
def group():
    """Commands of their own that fail in every way there is."""
    made = typer.Typer(cls=Commands)

    @made.command()
    def missing(json: bool = False):
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")

    @made.command()
    def full(json: bool = False):
        raise OSError(28, "No space left on device", "/store/part")

    @made.command()
    def broken():
        raise ModuleNotFoundError("No module named 'foretoken.nowhere'", name="foretoken.nowhere")

    @made.command()
    def wrong():
        raise ConfigError("a", "b", "c")

    return made


def test_a_missing_extra_says_what_to_install(group):
    refused(runner.invoke(group, ["missing"]), "lacks psutil", "pip install 'foretoken[bench]'")
    assert "psutil" in parts(runner.invoke(group, ["missing", "--json"]))["possible"]


def test_a_module_of_ours_that_is_missing_is_a_bug_and_stays_one(group):
    assert isinstance(runner.invoke(group, ["broken"]).exception, ModuleNotFoundError)


def test_a_full_disk_is_no_mistake_of_the_user_and_no_traceback(group):
    ran = runner.invoke(group, ["full"])
    assert ran.exit_code == 1 and "/store/part" in ran.stderr and "No space left" in ran.stderr
    assert "No space left" in parts(runner.invoke(group, ["full", "--json"]), 1)["possible"]


def test_how_much_is_told_is_chosen_with_v_and_q(pair_folders, caplog):
    target, draft = pair_folders
    how = ["generate", "the cat", "--target", target, "--draft", draft, "--max-new-tokens", 4]
    how += ["--set", "kernels=dense"]
    usual, loud, hushed = run(*how), run(*how, "-v"), run(*how, "-q")
    assert usual.stdout == loud.stdout == hushed.stdout
    assert hushed.stderr == ""
    assert "loading" in usual.stderr and "4 tokens in" in usual.stderr
    assert "probed" not in usual.stderr and "probed: drafts as trees" in loud.stderr
    assert "kernels: dense" in loud.stderr
    assert run(*how, "--json").stderr == ""
    logging.getLogger("foretoken").setLevel(logging.NOTSET)


def test_a_lossy_method_says_so_everywhere(pair_folders):
    target, draft = pair_folders
    how = ["--target", target, "--draft", draft, "--set", "kernels=dense"]
    how += ["--max-new-tokens", 4, "--method", "mcsd-target-init"]
    ran = run("generate", "the cat", *how, "-q")
    assert "LOSSY" in ran.stderr and "are preferred" in " ".join(ran.stderr.split())
    found = json.loads(run("generate", "the cat", *how, "--json").stdout)
    assert found["lossless"] is False and "are preferred" in found["why"]
    assert found["law"] == "not the target's own law"
    assert "LOSSY" in run("chat", *how, input="/exit\n").stderr
    how[-1] = "plain"
    found = json.loads(run("generate", "the cat", *how, "--json").stdout)
    assert found["lossless"] is True and found["law"] == "the target's own law"


@pytest.mark.parametrize("command", ["generate", "bench", "tune"])
def test_a_draft_that_is_not_there_is_refused_before_any_work(
    command, pair_folders, tmp_path, monkeypatch
):
    target = ["--target", pair_folders[0]]
    flags = {
        "generate": ["x", *target, "--draft", tmp_path],
        "bench": [*target, "--draft", tmp_path, "--methods", "chain", "--out", tmp_path / "o"],
        "tune": [*target, "--drafts", tmp_path, "--prompts", tmp_path / "asked.jsonl"],
    }[command]
    (tmp_path / "asked.jsonl").write_text('{"prompt": "a"}\n')

    def unread(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(reading, "read_weights", unread)
    ran = run(command, *flags)
    assert ran.exit_code == 2 and ran.stdout == ""
    assert f"error: {tmp_path}" in ran.stderr and "config.json" in " ".join(ran.stderr.split())


def test_starting_over_deletes_nothing_where_it_could_not_begin(pair_folders, tmp_path):
    shards = [tmp_path / name for name in ("train-000000.jsonl", "plan.json")]
    for path in shards:
        path.write_text("{}\n")
    model = tmp_path / "model-00001-of-00002.safetensors"
    model.write_text("weights")
    here = ["--out", tmp_path, "--fresh"]
    for wrong in (
        ["--data", tmp_path / "none.jsonl"],
        ["--target", tmp_path / "none"],
        ["--text", tmp_path / "none.txt"],
    ):
        ran = run("train", "data", "--target", pair_folders[0], *here, *wrong)
        assert ran.exit_code == 2 and "none" in ran.stderr
        assert all(path.exists() for path in (*shards, model))
    clear(tmp_path, LEFT_BY_RUNS)
    assert [path.name for path in tmp_path.iterdir()] == [model.name]


def test_a_model_is_never_written_over_by_training(pair_folders, tmp_path):
    target = pair_folders[0]
    before = {path.name: path.read_bytes() for path in Path(target).iterdir()}
    refused(run("train", "data", "--target", target, "--out", target), "pass another --out")
    assert {path.name: path.read_bytes() for path in Path(target).iterdir()} == before


@pytest.mark.parametrize("name", ["eagle3", "sorted", "data"])
def test_a_draft_that_nothing_would_read_is_refused(name, pair_folders, tmp_path):
    target, draft = pair_folders
    (tmp_path / "train-000000.jsonl").write_text("{}\n")
    given = ["--target", target, "--draft", draft, "--data", tmp_path, "--out", tmp_path / "out"]
    refused(run("train", name, *given), "--draft was passed", "leave it out")


def test_options_of_texts_that_are_written_already_are_refused(pair_folders, tmp_path):
    """They were taken and changed nothing."""
    given = ["--target", pair_folders[0], "--data", tmp_path, "--out", tmp_path / "out"]
    asked = ["--set", "temperature=0.5", "--set", "new_tokens=9"]
    refused(run("train", "eagle3", *given, *asked), "temperature and new_tokens", "leave")
    refused(run("train", "medusa", *given, *asked[2:]), "new_tokens passed", "train data")
    refused(run("train", "acceptance", *given, *asked), "target and draft say")


def test_a_head_for_a_target_of_ones_own_says_that_its_texts_are_toys(pair_folders, tmp_path):
    target, draft = pair_folders
    (tmp_path / "passages.txt").write_text("\n\n".join(f"the cat {n} is in" for n in range(12)))
    how = ["train", "acceptance", "--target", target, "--draft", draft, "-q"]
    for option in ("prompts=1", "new_tokens=24", "steps=20"):
        how += ["--set", option]
    ran = run(*how, "--out", tmp_path / "toys")
    assert ran.exit_code == 0, ran.output
    assert ran.stderr.count("toy families") == 1 and "--data FILE" in ran.stderr, ran.stderr
    ran = run(*how, "--out", tmp_path / "own", "--data", tmp_path / "passages.txt")
    assert ran.exit_code == 0 and "toy families" not in ran.stderr, ran.output


def test_a_replay_takes_the_method_that_its_list_names(pair_folders, tmp_path):
    """`method` is an option of its own here; where a model is loaded it is a flag."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "the {n} train in the rain"}}\n' for n in range(6)))
    how = ["train", "online", "--target", pair_folders[0], "--draft", pair_folders[1]]
    how += ["--data", data, "--out", tmp_path / "out", "--json"]
    for option in ("method=tree", "depth=3", "new_tokens=8", "share=1.0", "interval=2"):
        how += ["--set", option]
    ran = run(*how)
    assert ran.exit_code == 0, ran.output
    notes = json.loads(ran.stdout)
    assert notes["settings"]["method"] == "tree" and notes["learning"]["requests"] == 6
    for wrong in ("metod=tree", "method"):
        found = parts(run(*how, "--set", wrong))
        assert "`foretoken train online --list`" in found["do"]
    assert "did you mean method" in parts(run(*how, "--set", "metod=tree"))["do"]


def test_an_audit_report_is_a_file(tmp_path):
    refused(run("audit", "--methods", "plain", "--out", tmp_path), "is a folder", "audit.json")


def test_prompts_of_other_programs_are_read_as_they_are(tmp_path):
    """A byte order mark at the beginning, and separators that JSON leaves inside a text."""
    path = tmp_path / "asked.jsonl"
    lines = ['{"prompt": "one\u2028two\u0085three"}', "", '{"prompt": "four"}']
    path.write_text("\r\n".join(lines), encoding="utf-8-sig")
    assert [task.turns[0] for task in load_file(path)] == ["one\u2028two\u0085three", "four"]
    assert prompts(path, "all", 9) == ["one\u2028two\u0085three", "four"]
    assert len(prompts(None, "all", 9)) == 9, "of the six families"
    assert prompts(path, "train", 9) + prompts(path, "valid", 9) == prompts(path, "all", 9)


@pytest.mark.parametrize(("value", "kind"), [("[1, 2]", "list"), ("null", "NoneType")])
def test_a_prompt_that_is_no_text_is_refused(value, kind, tmp_path):
    """Its spelling in Python would be learned from."""
    path = tmp_path / "asked.jsonl"
    path.write_text(f'{{"prompt": "one"}}\n{{"prompt": {value}}}\n')
    with pytest.raises(ConfigError, match=rf"(?s)looks like.*{kind} is no text"):
        prompts(path, "all", 9)


def test_json_is_written_for_any_terminal(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    print_json({"text": "caf\u00e9"})
    out.flush()
    assert json.loads(out.buffer.getvalue()) == {"text": "caf\u00e9"}


def test_the_first_of_several_keys_is_sent():
    assert first_of("one, two") == "one" and first_of(None) is None
