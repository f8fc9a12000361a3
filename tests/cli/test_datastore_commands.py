"""Building, growing and describing a datastore from a terminal, and using it."""

import json

import pytest
from typer.testing import CliRunner

import foretoken
from foretoken.cli import app, logs
from foretoken.errors import ConfigError

runner = CliRunner()
TEXT = "the cat is in the hat, and the rat is in the cat. " * 20


def run(*arguments):
    return runner.invoke(app, ["datastore", *[str(a) for a in arguments]])


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.jsonl").write_text('{"text": "one text"}\n\n{"prompt": "two", "answer": "!"}\n')
    (folder / "picture").write_bytes(b"\x89PNG\0\0\xff")
    (folder / ".hidden").write_text("not this")
    return folder


def test_a_store_of_files_is_built_grown_and_described(texts, pair_folders, tmp_path):
    target, store = pair_folders[0], tmp_path / "store"
    ran = run("build", texts, "--target", target, "--out", store, "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["documents"] == 3, "a file, and two lines of another"
    (texts / "more.txt").write_text(TEXT)
    ran = run("add", store, texts / "more.txt", "--target", target, "--json")
    assert json.loads(ran.stdout)["documents"] == 4, ran.output
    told = run("info", store, "--check").stdout
    assert "4 documents" in told and "tokens" in told


def test_rest_writes_with_it(texts, pair_folders, tmp_path):
    target, store = pair_folders[0], tmp_path / "store"
    run("build", texts, "--target", target, "--out", store)
    shell = ["--target", str(target), "--set", "kernels=dense", "--max-new-tokens", "24", "--json"]
    rest = ["--method", "rest", "--set", f"datastore={store}", "--set", "nodes=8"]
    ran = runner.invoke(app, ["generate", "the cat is in", *shell, *rest])
    assert ran.exit_code == 0, ran.output
    plain = runner.invoke(app, ["generate", "the cat is in", *shell, "--method", "plain"])
    assert json.loads(ran.stdout)["tokens"] == json.loads(plain.stdout)["tokens"]


def test_generated_traffic_fills_a_store(tmp_path):
    ran = run("build", "--traffic", 12, "--out", tmp_path / "store", "--json")
    found = json.loads(ran.stdout)
    assert found["documents"] == 12 and found["tokens"] > 200 and found["vocab_size"] == 4096


def test_a_log_hears_how_much_was_read(texts, pair_folders, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "SECONDS_BETWEEN_LINES", 0.0)
    ran = run("build", texts, "--target", pair_folders[0], "--out", tmp_path / "store")
    assert ran.exit_code == 0, ran.output
    assert "reading ...\nreading: " in ran.stderr and " tokens\n" in ran.stderr


def test_another_tokenizer_is_refused_everywhere(texts, pair_folders, tmp_path):
    store = tmp_path / "store"
    run("build", "--traffic", 6, "--out", store)
    ran = run("add", store, texts, "--target", pair_folders[0])
    assert ran.exit_code == 2 and "another tokenizer" in ran.stderr
    mine = tmp_path / "mine"
    run("build", texts, "--target", pair_folders[0], "--out", mine)
    spec = foretoken.load(pair_folders[0], "rest", datastore=mine, kernels="dense")
    spec.tokenizer.add_tokens(["something else"])
    with pytest.raises(ConfigError, match="another tokenizer"):
        spec.using("rest", datastore=mine)


def test_what_cannot_be_built_is_refused(texts, tmp_path):
    for arguments, told in (
        (["build", "--out", tmp_path / "s"], "a datastore of nothing"),
        (["build", tmp_path / "none", "--out", tmp_path / "s"], "no such file or folder"),
        (["build", texts / "picture", "--out", tmp_path / "s"], "UTF-8"),
        (["info", tmp_path / "none"], "no such folder"),
        (["add", tmp_path / "none", texts], "no such folder"),
    ):
        ran = run(*arguments)
        assert ran.exit_code == 2 and told in " ".join(ran.stderr.split()), ran.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["texts"], "nothing half-written"
    run("build", "--traffic", 6, "--out", tmp_path / "s")
    ran = run("build", "--traffic", 6, "--out", tmp_path / "s")
    assert ran.exit_code == 2 and "nothing is overwritten" in ran.stderr


@pytest.mark.parametrize("layer", [99, 2, -3])
def test_keys_of_a_layer_that_is_not_there_are_refused(layer, texts, pair_folders, tmp_path):
    keys = ("--dense", "--target", pair_folders[0], "--layer", layer, "--out", tmp_path / "s")
    ran = run("build", texts / "a.txt", *keys)
    assert ran.exit_code == 2, ran.output
    assert "2 layers: 0 to 1, or -1" in " ".join(ran.stderr.split()), ran.output
    assert not (tmp_path / "s").exists()


def test_texts_without_a_token_make_no_store(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    for store in (tmp_path / "s", tmp_path / "deep" / "s"):
        ran = run("build", tmp_path / "empty.txt", "--out", store)
        assert ran.exit_code == 2 and "hold no token" in " ".join(ran.stderr.split()), ran.output
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_latin_1_is_named_and_leaves_no_store(tmp_path, pair_folders):
    (tmp_path / "old.txt").write_bytes("a caf\u00e9 ".encode("latin-1"))
    (tmp_path / "good.txt").write_text(TEXT)
    texts = (tmp_path / "good.txt", tmp_path / "old.txt")
    for more in ((), ("--dense", "--target", pair_folders[0])):
        ran = run("build", *texts, "--out", tmp_path / "s", *more)
        told = " ".join(ran.stderr.split())
        assert ran.exit_code == 2 and "byte 0xe9 at 5" in told and "iconv" in told, ran.output
        assert sorted(path.name for path in tmp_path.iterdir()) == ["good.txt", "old.txt"]


def test_a_folder_that_takes_no_files_is_refused_and_left(tmp_path, texts, pair_folders):
    (tmp_path / "file").write_text("")
    for more in ((), ("--dense", "--target", pair_folders[0])):
        ran = run("build", texts, "--out", tmp_path / "file" / "s", *more)
        assert ran.exit_code == 2 and "nothing can be written there" in ran.stderr, ran.output


def test_options_that_would_be_ignored_are_refused(tmp_path, texts):
    for arguments, told in (
        ([texts, "--dims", 8], "without --dense"),
        ([texts, "--seed", 3], "without --traffic"),
    ):
        ran = run("build", *arguments, "--out", tmp_path / "s")
        assert ran.exit_code == 2 and told in " ".join(ran.stderr.split()), ran.output


def test_a_method_without_its_store_is_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match="without its datastore"):
        foretoken.load("no-such-model", "rest")


@pytest.mark.parametrize(
    "line",
    ['{"prompt": [1, 2], "answer": [3]}', '{"text": null}', '{"prompt": "a", "answer": ["b"]}'],
)
def test_ids_and_messages_are_no_texts(line, pair_folders, tmp_path):
    """As in a folder of `foretoken train data`: their digits would be stored as text."""
    (tmp_path / "a.jsonl").write_text(line + "\n")
    store = tmp_path / "store"
    ran = run("build", tmp_path / "a.jsonl", "--target", pair_folders[0], "--out", store)
    assert ran.exit_code == 2 and "a text is a string" in " ".join(ran.output.split())
    assert not store.exists()
