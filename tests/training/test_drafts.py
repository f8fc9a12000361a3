"""Drafts for a user's own target: shaped, trained on its texts, measured by the engine, written."""

import copy
import json
import os
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, LlamaConfig, MptConfig

import foretoken
from foretoken.errors import CapabilityError, CheckpointError, ConfigError
from foretoken.heads.export import POSITIONS
from foretoken.lm import draft_exits, draft_vocabulary
from foretoken.training import checkpoint, recipes
from foretoken.training.dataset.making import DataConfig, make_data
from foretoken.training.dataset.stream import ChatStream
from foretoken.training.drafts import learning, shape, words, writing
from foretoken.training.drafts.learning import run_folder
from foretoken.training.drafts.making import DraftConfig, make_draft
from foretoken.training.drafts.measuring import EngineAcceptance
from foretoken.training.objectives.sparse_laws import SparseCrossEntropy, SparseLaws

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
TEXTS = DataConfig(
    chats=48, shard=24, new_tokens=24, held_out=0.2, laws=6, repeated=1.0, temperatures=(0.0, 1.0)
)
CONFIG = DraftConfig(
    shape=(64, 1), vocabulary=200, epochs=6.0, minutes=None, tokens=256, row_tokens=64,
    evaluations=2, held_out=4, precision="no",
)  # fmt: skip


@pytest.fixture(scope="module")
def session(tiny_pair, byte_tokenizer):
    with foretoken.load(tiny_pair[0], "plain", tokenizer=byte_tokenizer) as made:
        yield made


@pytest.fixture(scope="module")
def texts(session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    given = [f"in the {n} rain on the {n * 7 % 13} train" for n in range(48)]
    make_data(session, TEXTS, folder, given, show=False)
    return folder


@pytest.fixture(scope="module")
def draft(session, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("draft")
    notes = make_draft(session, CONFIG, texts, out, source="tiny", show=False)
    return out, notes


def dense_loss(states, rows, chosen, probs, decay):
    """The same loss from whole logits, by autograd."""
    log_q = (states @ rows.T).log_softmax(-1)
    told = log_q.gather(-1, chosen.clamp(min=0))
    overlap = torch.minimum(probs, told.exp()).sum(-1)
    share = (-decay * overlap).exp().detach()
    lost = (1 - share) * (probs.sum(-1) - overlap)
    return (lost - share * (probs * told).sum(-1)).sum() / len(states)


@pytest.mark.parametrize("decay", [0.0, 3.0])
def test_the_pieced_loss_and_its_gradients_are_those_of_whole_logits(decay, monkeypatch):
    monkeypatch.setattr("foretoken.training.objectives.sparse_laws.PIECE", 7)
    torch.manual_seed(0)
    states = torch.randn(23, 8, requires_grad=True)
    rows = torch.randn(30, 8, requires_grad=True)
    chosen = torch.stack([torch.randperm(30)[:5] for _ in range(23)])
    chosen[3, 2:] = -1
    chosen[5] = -1
    probs = torch.rand(23, 5).masked_fill(chosen < 0, 0.0)
    probs = probs / probs.sum(-1, keepdim=True).clamp(min=1.0) * 0.9
    loss, figures = SparseCrossEntropy.apply(states, rows, chosen, probs, decay)
    (3.0 * loss).backward()
    found = states.grad.clone(), rows.grad.clone()
    states.grad = rows.grad = None
    truth = dense_loss(states, rows, chosen, probs, decay)
    (3.0 * truth).backward()
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(found, (states.grad, rows.grad))
    q = (states @ rows.T).softmax(-1)
    overlap = torch.minimum(probs, q.gather(-1, chosen.clamp(min=0))).sum(-1).mean()
    torch.testing.assert_close(figures[1], overlap)


def test_the_loss_is_least_where_the_draft_says_the_targets_law(texts, session):
    """A draft with the target's own weights has no slope, up to the tokens a law leaves out."""
    model = copy.deepcopy(session.target.model)
    stream = ChatStream(texts, "train", tokens=256, row_tokens=64, pad=0, seed=0)
    batch = stream.batch(0)
    objective = SparseLaws.over(torch.arange(model.config.vocab_size), model.config.vocab_size)
    whole = {**batch}
    with torch.no_grad():
        states = model.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
        logits = model.lm_head(states).roll(1, 1)[batch["weights"] > 0]
    whole["laws"] = torch.arange(logits.shape[-1]).expand(len(logits), -1)
    whole["log_probs"] = logits.log_softmax(-1)
    loss, figures = objective(model, whole, random.Random(0))
    loss.backward()
    slope = max(float(w.grad.abs().max()) for w in model.parameters() if w.grad is not None)
    assert slope < 1e-4
    assert float(figures["overlap"]) == pytest.approx(1.0, abs=1e-4)
    other, _ = objective(copy.deepcopy(model).apply(jolt), whole, random.Random(0))
    assert other.item() > loss.item() + 0.01


@torch.no_grad()
def jolt(module):
    for weight in module.parameters(recurse=False):
        weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))


def test_a_token_outside_the_vocabulary_teaches_nothing():
    objective = SparseLaws.over(torch.tensor([2, 5]), 9, hard=0.5)
    batch = {
        "input_ids": torch.tensor([[1, 5, 7]]), "weights": torch.tensor([[0.0, 1.0, 1.0]]),
        "laws": torch.tensor([[5, 8], [7, 2]]),
        "log_probs": torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log(),
    }  # fmt: skip
    chosen, probs = objective.laws(batch)
    assert chosen.tolist() == [[1, -1, 1], [-1, 0, -1]]
    torch.testing.assert_close(probs, torch.tensor([[0.25, 0.0, 0.5], [0.0, 0.125, 0.0]]))


def test_training_raises_acceptance_and_the_best_weights_are_kept(draft):
    out, notes = draft
    told = [figures["acceptance"] for _, figures in notes["measured"]]
    assert len(told) == 2
    assert notes["held_out"][-1][1] < notes["first_loss"] - 0.3
    assert json.loads((out / "card.json").read_text())["vocabulary"]["tokens"] == 200
    assert (out / "loss.png").stat().st_size > 10_000
    assert "AutoModelForCausalLM" in (out / "README.md").read_text()


def test_a_draft_is_an_ordinary_model_of_the_targets_vocabulary(draft, session):
    out, _ = draft
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == session.target.vocab_size
    assert AutoTokenizer.from_pretrained(out).get_vocab() == session.tokenizer.get_vocab()
    tokens = json.loads((out / draft_vocabulary.NAME).read_text())["tokens"]
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 200
    assert set(session.eos) <= set(tokens)


def test_a_trained_draft_changes_no_text(draft, session):
    out, _ = draft
    prompts = ["in the rain", "on a train there", "other"]
    with foretoken.load(
        session.target.model, "chain", draft=out, tokenizer=session.tokenizer, depth=3
    ) as fast:
        for options in ({"temperature": 0.0},):
            texts = [
                [r.tokens for r in s.generate(prompts, 40, seed=5, **options)]
                for s in (session, fast)
            ]
            assert texts[0] == texts[1]


def test_a_run_that_broke_off_ends_with_the_same_weights(session, texts, draft, tmp_path):
    """The run is cut by an exception in the engine's second measurement, after its checkpoint."""
    broken = copy.copy(CONFIG)
    real = EngineAcceptance.__call__
    seen = []

    def failing(self, model):
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(self, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineAcceptance, "__call__", failing)
        with pytest.raises(KeyboardInterrupt):
            make_draft(session, broken, texts, tmp_path, source="tiny", show=False)
    assert not (tmp_path / "config.json").exists()
    assert checkpoint.latest(next((tmp_path / "training").iterdir()) / "run")
    again = make_draft(session, CONFIG, texts, tmp_path, source="tiny", show=False)
    assert again["steps"] == draft[1]["steps"]
    one, other = (
        AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (tmp_path, draft[0])
    )
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=0, rtol=0)


def test_acceptance_of_the_target_as_its_own_draft_is_one(session, texts):
    prompts = learning.held_out(texts, 4)
    vocab = session.target.vocab_size
    same = EngineAcceptance(session, prompts, None, 0.1).measure(session.target.model)
    assert same.acceptance == 1.0
    assert same.mean_accepted_length > 4.5
    cut = torch.arange(vocab // 2)
    half = EngineAcceptance(session, prompts, cut, 0.1).measure(session.target.model)
    assert 0.1 < half.acceptance < 0.95


def test_embeddings_of_a_draft_keep_the_targets_geometry():
    """Of a table of low rank nothing is lost: inner products are the same up to scale."""
    torch.manual_seed(0)
    table = torch.randn(300, 6) @ torch.randn(6, 40)
    found = shape.projected(table, torch.rand(300) * 10, 6)
    assert found.shape == (300, 6)
    gram = [((t - t.mean(0)) @ (t - t.mean(0)).T).flatten() for t in (table, found)]
    assert torch.corrcoef(torch.stack(gram))[0, 1] > 0.9999
    assert float(found.pow(2).mean()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "told", "expected"),
    [
        (BloomConfig, {"n_layer": 4, "n_head": 4}, POSITIONS),  # ALiBi: it names no end
        (MptConfig, {"n_layers": 4, "n_heads": 4, "max_seq_len": 96}, 96),
        (LlamaConfig, {"max_position_embeddings": 96}, 96),
        (LlamaConfig, {"max_position_embeddings": 128, "rope_parameters": YARN}, 512),
    ],
)
def test_a_draft_reads_as_many_tokens_as_its_target(kind, told, expected):
    config = shape.Shape(64, 1).config(kind(**told), 256)
    assert config.max_position_embeddings == expected


def test_a_shape_costs_no_more_than_asked(make_llama, monkeypatch):
    monkeypatch.setattr(shape, "SHAPES", shape.SHAPES[:1])
    target = make_llama(4000, hidden_size=256, num_hidden_layers=4)
    found, cost = shape.fitting_shape(target, 500, 0.9)
    assert cost <= 0.9
    assert found in shape.SHAPES
    with pytest.raises(CapabilityError, match="smallest one takes"):
        shape.fitting_shape(target, 500, 1e-6)


def test_the_most_frequent_tokens_are_kept_and_the_end_always():
    counts = torch.tensor([5.0, 1.0, 9.0, 0.0, 3.0])
    assert words.frequent(counts, 3, [3]).tolist() == [0, 2, 3]
    assert words.covered(counts, torch.tensor([0, 2])) == pytest.approx(14 / 18)


def test_a_full_disk_leaves_no_half_model(draft, session, texts, tmp_path, monkeypatch):
    out, notes = draft
    model = AutoModelForCausalLM.from_pretrained(out)
    monkeypatch.setattr(draft_vocabulary, "NAME", "x" * 300)  # a name no disk takes
    with pytest.raises(CheckpointError, match="cannot be written"):
        writing.write_draft(tmp_path, model, session, torch.arange(9), notes)
    assert not list(tmp_path.iterdir())


def test_a_recipe_without_texts_says_how_to_make_them(tmp_path):
    with pytest.raises(ConfigError, match="train data --target mine"):
        recipes.check_order("draft", "mine", None)
    with pytest.raises(ConfigError, match="there are none"):
        recipes.check_order("draft", "mine", tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [{"cost": 0.0}, {"shape": (100, 1)}, {"shape": (64, 0)}, {"shape": (192,)},
     {"shape": (192, 4, 2)}, {"precision": "fp8"}, {"minutes": -1.0}, {"hard": 2.0},
     {"vocabulary": 0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        replace(CONFIG, **wrong)


def test_a_build_without_onednn_learns_in_float32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    assert not replace(CONFIG, precision="auto").in_bf16


def test_a_run_goes_on_with_the_same_texts_and_target_only(texts, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(texts, other)
    one = run_folder(tmp_path, CONFIG, texts, "target")
    assert one == run_folder(tmp_path, CONFIG, other, "target"), "it is what they say that counts"
    [first, *_] = sorted(other.glob("train-*.jsonl"))
    first.write_text("".join(first.read_text().splitlines(keepends=True)[:-1]))
    assert len({one, run_folder(tmp_path, CONFIG, other, "target"),
                run_folder(tmp_path, CONFIG, texts, "another")}) == 3  # fmt: skip


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_folder_with_an_empty_split_is_refused_before_any_work(split, session, texts, tmp_path):
    shutil.copytree(texts, tmp_path / "data")
    for path in (tmp_path / "data").glob(f"{split}-*.jsonl"):
        path.write_text("")
    with pytest.raises(ConfigError, match=f"none of the split '{split}'"):
        make_draft(session, CONFIG, tmp_path / "data", tmp_path / "out", show=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["data", "draft"])
def test_texts_are_never_written_over(texts, name):
    with pytest.raises(ConfigError, match="into the same folder"):
        recipes.check_order(name, "mine", texts, texts / ".." / texts.name)


def test_starting_over_leaves_texts_where_they_are(texts, tmp_path):
    shutil.copytree(texts, tmp_path, dirs_exist_ok=True)
    (tmp_path / "training" / "abc").mkdir(parents=True)
    recipes.clear(tmp_path)
    assert not (tmp_path / "training").exists() and list(tmp_path.glob("train-*.jsonl"))
    recipes.clear(tmp_path, recipes.LEFT_BY_RUNS)
    assert not list(tmp_path.glob("train-*"))


def test_a_run_goes_on_with_the_same_number_of_processes_only(texts, tmp_path, monkeypatch):
    one = run_folder(tmp_path, CONFIG, texts, "target")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_folder(tmp_path, CONFIG, texts, "target") != one


def test_nothing_of_an_earlier_draft_stays_beside_a_new_one(draft, session, tmp_path):
    out, notes = draft
    model, exits = AutoModelForCausalLM.from_pretrained(out), tmp_path / draft_exits.NAME
    for name in (draft_exits.NAME, "model-00001-of-00002.safetensors", "mine.txt"):
        (tmp_path / name).write_text("{}")
    writing.write_draft(tmp_path, model, session, torch.arange(9), notes, beside={"x.json": "1"})
    assert not exits.exists() and len(list(tmp_path.glob("*.safetensors"))) == 1
    assert (tmp_path / "mine.txt").exists()
    text = '{"version": 1}'
    writing.write_draft(tmp_path, model, session, torch.arange(9), notes, beside={exits.name: text})
    assert exits.read_text() == text


def test_a_draft_is_written_again_beside_several_chat_templates(draft, session, tmp_path):
    """They lie in a folder of their own."""
    out, notes = draft
    tokenizer = copy.deepcopy(session.tokenizer)
    tokenizer.chat_template = {"default": "one", "tool_use": "other"}
    several = SimpleNamespace(tokenizer=tokenizer)
    for _ in range(2):
        model = AutoModelForCausalLM.from_pretrained(out)
        writing.write_draft(tmp_path, model, several, torch.arange(9), notes)
        assert (tmp_path / "additional_chat_templates").is_dir()
        assert AutoModelForCausalLM.from_pretrained(tmp_path).config.hidden_size == 64


def test_a_draft_half_written_is_no_model_with_the_earlier_config(
    draft, session, tmp_path, monkeypatch
):
    out, notes = draft
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)

    real = os.replace

    def killed(source, into):
        if into.parent == tmp_path:
            raise KeyboardInterrupt
        real(source, into)

    monkeypatch.setattr(writing.os, "replace", killed)
    model = AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(KeyboardInterrupt):
        writing.write_draft(tmp_path, model, session, torch.arange(9), notes)
    assert not (tmp_path / "config.json").exists()


def test_a_torch_without_muon_is_told_of_before_a_draft_is_begun(texts, tmp_path, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ConfigError, match=r"no Muon; 2\.9 and later do"):
        run_folder(tmp_path / "out", CONFIG, texts, "target")
    assert not (tmp_path / "out").exists()
    assert run_folder(tmp_path / "out", replace(CONFIG, matrix_rate=0.0), texts, "target").is_dir()
