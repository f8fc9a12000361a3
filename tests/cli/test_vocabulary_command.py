"""`foretoken vocabulary`: what it counts and measures, which size it takes, what it refuses."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from foretoken.cli.commands import app
from foretoken.lm.draft_vocabulary import NAME, read
from foretoken.lm.load import load_model
from foretoken.training import reduced_vocabulary

VOCAB = 265
SHIPPED_VOCAB = 4096


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def models(pair_folders):
    return ["--target", pair_folders[0], "--draft", pair_folders[1]]


def shard(folder, answers):
    """A folder as `foretoken train data` writes it."""
    folder.mkdir()
    lines = [
        json.dumps({"kind": "chat", "temperature": 0.0, "prompt": [200, 201], "answer": answer})
        for answer in answers
    ]
    (folder / "train-0.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "valid-0.jsonl").write_text(lines[0].replace("[200, 201]", "[7, 8]") + "\n")
    return folder


def test_the_tokens_of_answers_are_taken_by_their_number(models, tmp_path, byte_tokenizer):
    data = shard(tmp_path / "data", [[70, 71, 70, 72]] * 19 + [[73, 70]])
    out = tmp_path / "words.json"
    special = byte_tokenizer.all_special_ids
    kept = len(special) + 3
    ran = run("vocabulary", *models, "--data", data, "--size", kept, "--out", out, "--json")
    assert ran.exit_code == 0, ran.output
    assert set(read(out, VOCAB)) == {*special, 70, 71, 72}  # 73 is rarer, prompts do not count
    document = json.loads(ran.stdout)
    assert document["chosen"] == kept and document["vocab_size"] == VOCAB
    assert [row["tokens"] for row in document["sizes"]] == [kept, VOCAB]
    assert document["sizes"][1]["coverage"] == 1.0
    written = run(
        "generate", "the end", *models, "--draft-vocabulary", out, "--set", "kernels=dense",
        "--max-new-tokens", 8, "--json",
    )  # fmt: skip
    plain = run(
        "generate", "the end", *models[:2], "--method", "plain", "--set", "kernels=dense",
        "--max-new-tokens", 8, "--json",
    )  # fmt: skip
    assert json.loads(written.stdout)["tokens"] == json.loads(plain.stdout)["tokens"]


def test_text_of_others_counts_only_where_there_are_no_answers(tmp_path):
    data = shard(tmp_path / "data", [[70, 71]] * 3)
    window = json.dumps({"kind": "text", "temperature": 1.0, "prompt": [9], "answer": [80, 81]})
    (data / "train-text-000000.jsonl").write_text(f"{window}\n" * 3)
    session = SimpleNamespace(tokenizer=None, target=SimpleNamespace(vocab_size=VOCAB))
    for said in ([70, 71], [80, 81]):
        found = reduced_vocabulary.read_texts(data, session)
        assert [text.written for text in found] == [said] * 3
        (data / "train-0.jsonl").unlink(missing_ok=True)


def test_texts_of_another_tokenizer_are_not_counted(models, tmp_path):
    data = shard(tmp_path / "data", [[70, 71]] * 3)
    card = {"target": "other", "vocabulary": {"size": 300, "digest": "x"}}
    (data / "card.json").write_text(json.dumps(card))
    ran = run("vocabulary", *models, "--data", data, "--size", 100)
    told = " ".join(ran.stderr.split())
    assert ran.exit_code == 2 and "counting the tokens of the texts in" in told
    assert "other of another vocabulary (300 tokens)" in told


def test_into_the_drafts_folder_and_from_what_the_target_writes(tmp_path):
    """The shipped target alone: the prompts at hand are of its own families."""
    ran = run("vocabulary", "--prompts", 4, "--size", 100, "--out", tmp_path)
    assert ran.exit_code == 0, ran.output
    assert "chosen" in ran.stdout and "tokens/s" in ran.stdout
    assert len(read(tmp_path / NAME, SHIPPED_VOCAB)) == 100


def test_a_target_of_ones_own_is_not_counted_on_toy_prompts(models, tmp_path):
    """Every later load would take the list silently, and guess little of real text."""
    for flags in ([], ["--prompts", 4]):
        ran = run("vocabulary", *models, *flags, "--size", 100, "--out", tmp_path)
        told = " ".join(ran.stderr.split())
        assert ran.exit_code == 2 and ran.stdout == "", ran.output
        assert "toy families" in told and "then pass --data DIR" in told
        assert f"`foretoken train data --target {models[1]} --out DIR`" in told
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_it_only_tells(models, tmp_path):
    (tmp_path / "texts.txt").write_text("the one\n\nthe other\n\nin the end\n")
    ran = run("vocabulary", *models, "--data", tmp_path / "texts.txt")
    assert ran.exit_code == 0, ran.output
    assert "nothing was written" in ran.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--size", "many"], "a number of tokens, or auto"),
        (["--size", 1], "special and end tokens"),
        (["--size", 266], "265 in all"),
        (["--data", "none.txt"], "cannot be read"),
        (["--prompts", 4], "--prompts 4 was passed with --data"),
    ],
)
def test_what_it_refuses(models, tmp_path, flags, said):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "the one"}\n' * 3)
    data = [] if "--data" in flags else ["--data", texts]
    ran = run("vocabulary", *models, *data, *flags)
    assert ran.exit_code == 2, ran.output
    told = " ".join(ran.stderr.split())
    assert said in told and "possible here:" in told and "what to do:" in told


def test_a_size_that_cannot_be_is_refused_before_the_target_writes(monkeypatch):
    monkeypatch.setattr(reduced_vocabulary, "written_by", None)
    ran = run("vocabulary", "--size", SHIPPED_VOCAB + 1)
    assert ran.exit_code == 2 and "4096 in all" in " ".join(ran.stderr.split())


def test_a_folder_of_one_text_and_a_broken_line_are_refused(models, tmp_path):
    one = run("vocabulary", *models, "--data", shard(tmp_path / "one", [[70]]))
    assert one.exit_code == 2 and "it holds 1 texts" in " ".join(one.stderr.split())
    (tmp_path / "bad.jsonl").write_text('{"answer": 5}\n{"text": "a"}\n')
    bad = run("vocabulary", *models, "--data", tmp_path / "bad.jsonl")
    assert bad.exit_code == 2 and "a line looks like" in " ".join(bad.stderr.split())


def test_a_draft_with_other_ids_is_refused_before_any_text(pair_folders, tmp_path, byte_tokenizer):
    """Ids of the target would be taken for rows of its output layer."""
    target, wider = (shutil.copytree(one, tmp_path / one.name) for one in pair_folders)
    for folder in (target, wider):
        byte_tokenizer.save_pretrained(folder)
    model = load_model(pair_folders[1])
    model.resize_token_embeddings(VOCAB + 8)
    model.save_pretrained(wider)
    out, unread = tmp_path / "words.json", tmp_path / "none.txt"
    given = ["--target", target, "--draft", wider, "--data", unread]
    ran = run("vocabulary", *given, "--out", out)
    told = " ".join(ran.output.split())
    assert ran.exit_code == 2 and "its width is not the target's" in told, told
    assert not out.exists()
