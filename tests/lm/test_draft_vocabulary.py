"""Reduced draft vocabularies: their files, and models of which some output rows are computed."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from foretoken.coins import SeededCoins
from foretoken.errors import CapabilityError, CheckpointError, ConfigError
from foretoken.lm.draft_vocabulary import NAME, OutputRows, check_asked, chosen_rows, read, write
from foretoken.lm.few_rows import with_few_rows
from foretoken.lm.opening import open_draft, open_lm
from foretoken.row import make_row
from foretoken.trees.build import chain
from foretoken.types import Draft, Draw, SamplingParams

VOCAB = 97
WORDS = [*range(3, 60, 2), 62, 90, 95, 96]  # enough for none to be computed beside them
PROMPT = [5, 9, 2, 41, 9, 2]


def scored(lm, tokens=(2, 8, 17)):
    row = make_row(PROMPT, SamplingParams(), SeededCoins(0), VOCAB)
    lm.prefill([row])
    [score] = lm.score([row], [Draft(chain(row.tokens[-1], tokens), Draw.POINT)])
    lm.free([row])
    return score


def test_a_file_is_read_as_it_was_written(tmp_path):
    assert read(write(tmp_path / "new" / NAME, [9, 1, 4, 1], VOCAB), VOCAB) == [1, 4, 9]
    assert json.loads((tmp_path / "new" / NAME).read_text()) == {
        "version": 1, "vocab_size": VOCAB, "tokens": [1, 4, 9],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("[1]", "version 1"),
        ('{"version": 2, "vocab_size": 97, "tokens": [1]}', "version 1"),
        ('{"version": 1, "vocab_size": 97, "tokens": [1.5]}', "no list of ids"),
        ('{"version": 1, "vocab_size": 96, "tokens": [1]}', "made for 96 tokens"),
        ('{"version": 1, "vocab_size": 97, "tokens": []}', "ascending"),
        ('{"version": 1, "vocab_size": 97, "tokens": [2, 2]}', "ascending"),
        ('{"version": 1, "vocab_size": 97, "tokens": [2, 97]}', "ascending"),
        ('{"version": 1, "vocab_size": 97, "tokens": [-1, 2]}', "ascending"),
    ],
)
def test_a_broken_file_is_refused_with_what_is_wrong(tmp_path, text, said):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path / NAME, VOCAB)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / NAME / "in the way").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="nothing can be written"):
        write(tmp_path / NAME, [5], VOCAB)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_what_is_asked_decides_over_what_the_directory_says(tmp_path):
    write(tmp_path / NAME, [1, 2], VOCAB)
    assert chosen_rows(None, tmp_path, VOCAB).tokens.tolist() == [1, 2]
    assert chosen_rows(None, str(tmp_path), VOCAB).tokens.tolist() == [1, 2]
    assert chosen_rows("off", tmp_path, VOCAB) is None
    assert chosen_rows([7, 5], tmp_path, VOCAB).tokens.tolist() == [5, 7]
    assert chosen_rows(torch.tensor([7, 5]), tmp_path, VOCAB).tokens.tolist() == [5, 7]
    assert chosen_rows(range(VOCAB), tmp_path, VOCAB) is None  # all of them: nothing is reduced
    assert chosen_rows(tmp_path / NAME, "elsewhere", VOCAB).tokens.tolist() == [1, 2]
    assert chosen_rows(tmp_path, "elsewhere", VOCAB).tokens.tolist() == [1, 2]
    assert chosen_rows(None, tmp_path / "none", VOCAB) is None


def test_a_file_in_the_home_directory_is_found_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / NAME, [1, 2], VOCAB)
    write(tmp_path / "draft" / NAME, [3], VOCAB)
    check_asked(f"~/{NAME}")
    assert chosen_rows(f"~/{NAME}", "elsewhere", VOCAB).tokens.tolist() == [1, 2]
    assert chosen_rows("~", "elsewhere", VOCAB).tokens.tolist() == [1, 2]
    assert chosen_rows(None, "~/draft", VOCAB).tokens.tolist() == [3]


@pytest.mark.parametrize("asked", [[], [97], [-1], ["a"], [True], 5, {"a": 1}])
def test_ids_that_are_no_tokens_are_refused(asked):
    with pytest.raises(ConfigError, match="draft's vocabulary"):
        chosen_rows(asked, None, VOCAB)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("compile", ["auto", "off"])
def test_the_listed_rows_say_what_they_say_beside_all_others(make_llama, tied, compile):
    model = make_llama(VOCAB, tie_word_embeddings=tied)
    rows = OutputRows.of_tokens(WORDS, VOCAB)
    with open_lm(model, compile=compile) as whole:
        expected = scored(whole).logits
    draft = open_draft(model, rows, compile=compile)
    found = scored(draft)
    assert found.few.logits.shape == (4, len(WORDS))  # no other row was computed
    assert torch.allclose(found.logits[:, WORDS], expected[:, WORDS], atol=1e-4)
    others = [token for token in range(VOCAB) if token not in WORDS]
    assert (found.logits[:, others] == -torch.inf).all()
    assert draft.vocab_size == VOCAB
    assert draft.model.get_output_embeddings().weight.shape[0] == len(WORDS)
    draft.close()


def test_the_callers_model_is_not_touched_and_its_weights_are_not_copied(make_llama):
    model = make_llama(VOCAB, tie_word_embeddings=True).train()
    head = model.get_output_embeddings()
    draft = open_draft(model, OutputRows.of_tokens(WORDS, VOCAB), compile="off")
    assert model.get_output_embeddings() is head and len(head.weight) == VOCAB
    assert all(module.training for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())
    mine = {id(weight) for weight in model.parameters()}
    copies = [weight for weight in draft.model.parameters() if id(weight) not in mine]
    assert [tuple(weight.shape) for weight in copies] == [(len(WORDS), 64)]
    with open_lm(model, kernels="packed", name="another") as other:  # the same weights, all rows
        assert scored(other).logits.shape == (4, VOCAB)
        draft.check_usable()
    draft.close()


def changed_in_place(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)


def replaced(model):
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                setattr(module, name, nn.Parameter(weight.data * 1.3))


def through_data(model):
    for weight in model.parameters():
        weight.data *= 1.3


@pytest.mark.parametrize("change", [changed_in_place, replaced, through_data])
@pytest.mark.parametrize("compile", ["auto", "off"])
def test_changed_weights_are_followed_the_output_layers_too(make_llama, change, compile):
    model = make_llama(VOCAB)
    draft = open_draft(model, OutputRows.of_tokens(WORDS, VOCAB), compile=compile)
    before = scored(draft).logits[:, WORDS]
    change(model)
    draft.refresh()
    with torch.no_grad():
        expected = model(torch.tensor([[*PROMPT, 2, 8, 17]])).logits[0, -4:, WORDS]
    after = scored(draft).logits[:, WORDS]
    assert not torch.allclose(before, after, atol=1e-2)
    assert torch.allclose(after, expected, atol=1e-4)
    draft.close()


def test_few_tokens_are_scored_beside_others_that_stand_for_nothing(make_llama):
    model = make_llama(VOCAB)
    with open_lm(model) as whole:
        expected = scored(whole).logits
    draft = open_draft(model, OutputRows.of_tokens([50, 7], VOCAB))
    found = scored(draft)
    assert torch.allclose(found.few.logits, expected[:, [50, 7]], atol=1e-4)
    assert found.logits.isfinite().sum() == 2 * len(found.logits)
    draft.close()


def test_an_output_layer_that_cannot_be_cut_is_refused(make_llama):
    model = make_llama(VOCAB)

    class Scaled(nn.Linear):
        def forward(self, states):
            return super().forward(states) * 2.0

    head = Scaled(64, VOCAB, bias=False)
    model.set_output_embeddings(head)
    with pytest.raises(CapabilityError, match="output layer is a Scaled"):
        with_few_rows(model, torch.tensor(WORDS))


def test_logits_that_look_at_each_other_are_refused(make_llama):
    model = make_llama(VOCAB)
    whole = type(model).forward

    class Normed(type(model)):
        def forward(self, *args, **named):
            out = whole(self, *args, **named)
            out.logits = out.logits - out.logits.logsumexp(-1, keepdim=True) * 5.0
            return out

    model.__class__ = Normed
    with pytest.raises(CapabilityError, match="rows alone"):
        with_few_rows(model, torch.tensor(WORDS))
