"""Recipes: the tiny ones end to end, and what is refused."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from foretoken import minis
from foretoken.cli import app
from foretoken.errors import CheckpointError, ConfigError
from foretoken.minis import card, evaluate, recipes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("minis") / "tiny"
    recipes.train("tiny", out, progress=False)
    return out


def test_a_finished_mini_loads_like_any_model_and_says_how_it_was_made(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    found = json.loads((tiny / "card.json").read_text())
    assert found["phases"]["data"]["steps"] == 6
    assert found["parameters"] == model.num_parameters()
    assert "standard library" in (tiny / "README.md").read_text()


def test_a_draft_shares_its_teachers_vocabulary(tiny, tmp_path):
    recipes.train("tiny-draft", tmp_path / "draft", teacher=tiny, progress=False)
    draft = json.loads((tmp_path / "draft" / "card.json").read_text())
    assert list(draft["phases"]) == ["data", "distill"]
    same = (tiny / "tokenizer.json").read_text() == (tmp_path / "draft/tokenizer.json").read_text()
    assert same
    found = evaluate.report(tiny, tmp_path / "draft", count=2, families=["translation"])
    row = found["families"]["translation"]
    assert 1.0 <= row["mean_accepted_length"] <= 6.0
    assert 0.0 <= row["agreement"] <= 1.0
    assert 0.0 < row["entropy_per_token"] < torch.tensor(512.0).log()
    card.add_measurements(tiny, found)
    assert "mean accepted length" in (tiny / "README.md").read_text()


def test_a_draft_begun_with_another_teacher_does_not_go_on(tiny, tmp_path):
    out, other = tmp_path / "draft", tmp_path / "other"
    shutil.copytree(tiny, other, ignore=shutil.ignore_patterns("training"))
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    model.save_pretrained(other)
    asked = {"scale": 0.5, "progress": False}
    recipes.train("tiny-draft", out, teacher=tiny, **asked)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"begun there with another teacher(.|\n)*--fresh"):
        recipes.train("tiny-draft", out, teacher=other, **asked)
    assert (out / "model.safetensors").read_bytes() == before
    recipes.train("tiny-draft", out, teacher=other, resume=False, **asked)
    with pytest.raises(ConfigError, match="begun there with another teacher"):
        recipes.train("tiny-draft", out, teacher=tiny, **asked)


def test_a_teacher_of_another_vocabulary_is_refused(make_llama, tmp_path):
    make_llama(99).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="has 512 tokens and that teacher 99"):
        recipes.train("tiny-draft", tmp_path / "x", teacher=tmp_path / "other", progress=False)
    assert not (tmp_path / "x").exists()


def test_scale_shortens_a_run(tmp_path):
    assert recipes.train("tiny", tmp_path / "short", scale=0.5, progress=False).step == 3


def test_a_run_of_another_scale_does_not_go_on(tmp_path):
    recipes.train("tiny", tmp_path, scale=0.5, progress=False)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"begun there with another scale(.|\n)*--fresh"):
        recipes.train("tiny", tmp_path, progress=False)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    note = tmp_path / "training" / "scale.json"
    told = json.loads(note.read_text())
    note.write_text(json.dumps({**told, "steps": [9]}) + "\n")
    with pytest.raises(ConfigError, match=r"the recipe had other steps: .*\[9\]"):
        recipes.train("tiny", tmp_path, scale=0.5, progress=False)
    note.unlink()
    assert recipes.train("tiny", tmp_path, progress=False).step == 6, "none was noted once"
    assert not note.exists(), "whose scale it is nobody knows"


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="text-target"):
        recipes.train("text-targe", tmp_path)
    with pytest.raises(ConfigError, match="text-draft"):
        minis.path("text-drafd")
    with pytest.raises(ConfigError, match="positive"):
        recipes.train("tiny", tmp_path / "x", scale=0)
    with pytest.raises(CheckpointError, match="tiny first"):
        recipes.train("tiny-draft", tmp_path / "x", teacher=tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        evaluate.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        recipes.train("tiny", tmp_path / "file" / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def trained(*arguments) -> str:
    """What `foretoken minis train` says on its way out by status 2."""
    ran = CliRunner().invoke(app, ["minis", "train", *map(str, arguments)])
    assert ran.exit_code == 2, ran.output
    return " ".join(ran.stderr.split())


def test_another_model_is_not_written_over(tiny, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("of somebody else")
    for out, more in ((tmp_path, ("tiny",)), (tiny, ("tiny-draft", "--teacher", tiny))):
        before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
        assert "holds another model" in trained(*more, "--out", out)
        assert {f: f.read_bytes() for f in out.rglob("*") if f.is_file()} == before


def test_a_teacher_is_refused_where_nobody_is_taught(tiny, tmp_path):
    assert "leave the teacher out" in trained("tiny", "--teacher", tiny, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_draft_with_other_ids_is_not_compared(tiny, byte_tokenizer, make_llama, tmp_path):
    make_llama(len(byte_tokenizer)).save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer of its own"):
        evaluate.report(tiny, tmp_path, count=1, families=["translation"])


def test_an_end_that_the_target_did_not_say_is_not_counted(byte_tokenizer, make_llama, tmp_path):
    model = make_llama(len(byte_tokenizer), max_position_embeddings=2048)
    with torch.no_grad():
        model.lm_head.weight[byte_tokenizer.eos_token_id] = 0.0  # others are always likelier
    model.save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    found = evaluate.report(tmp_path, tmp_path, count=1, families=["translation"])
    row = found["families"]["translation"]
    assert row["answer_tokens"] == 128, "as many as it may write"
    assert row["agreement"] == 1.0


@pytest.mark.parametrize(
    ("agrees", "steps"),
    [
        ([True] * 6, 1),  # five accepted and the bonus
        ([True] * 5 + [False], 1),
        ([False] * 4, 4),
        ([True, False, True, True, False], 2),
        ([True] * 12, 2),
    ],
)
def test_accepted_length_counts_the_bonus(agrees, steps):
    assert evaluate.accepted_length(agrees, depth=5) == (len(agrees), steps)


def test_a_torch_without_muon_is_told_of_before_a_mini_is_begun(tmp_path, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ConfigError, match=r"no Muon; 2\.9 and later do"):
        recipes.train("tiny", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
