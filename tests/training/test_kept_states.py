"""Hidden states of the target, kept in the pass that makes texts: its own, bounded, read back."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from test_dataset import CHAT, contents, talker

import foretoken
from foretoken.errors import CapabilityError, ConfigError
from foretoken.training.dataset.making import DataConfig, make_data
from foretoken.training.dataset.records import read_chats, shards
from foretoken.training.dataset.states import States, kept_states
from foretoken.training.features import Shuffled

CONFIG = DataConfig(
    chats=12, shard=6, new_tokens=10, held_out=0.2, laws=5, repeated=1.0, text_window=24,
    temperatures=(0.0, 1.0), features=("final", 0),
)  # fmt: skip
GIVEN = [f"question number {n}" for n in range(12)]


@pytest.fixture(scope="module")
def session(tiny_pair, byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = CHAT
    with foretoken.load(talker(tiny_pair[0]), "plain", tokenizer=tokenizer, max_rows=16) as made:
        yield made


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(" ".join(f"tree {n} has {n * n % 23} leaves." for n in range(30)))
    return str(path)


@pytest.fixture(scope="module")
def folder(session, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("texts")
    make_data(session, CONFIG, path, GIVEN, [text], show=False)
    return path


def test_kept_states_are_those_of_a_separate_forward(session, folder):
    model = session.target.model
    for split in ("train", "valid"):
        kept, at = kept_states(folder, split), 0
        for path in shards(folder, split):
            for chat in read_chats(path):
                with torch.no_grad():
                    said = model(
                        torch.tensor([chat.prompt + chat.answer]), output_hidden_states=True
                    )
                here = kept.take(torch.arange(at, at + len(chat.answer)))
                place = slice(len(chat.prompt) - 1, -1)
                truth = [said.hidden_states[layer][0, place] for layer in (-1, 1)]
                assert here["input_ids"].tolist() == chat.answer
                assert here["hidden"].dtype == torch.float16
                torch.testing.assert_close(
                    here["hidden"].float(), torch.stack(truth, 1), atol=2e-3, rtol=2e-3
                )
                logits = model.lm_head(here["hidden"][:, 0].float())
                torch.testing.assert_close(logits, said.logits[0, place], atol=2e-2, rtol=1e-2)
                at += len(chat.answer)
        assert at == len(kept) > 20


def test_states_change_no_text_and_no_law(session, folder, text, tmp_path):
    make_data(session, replace(CONFIG, features=None), tmp_path, GIVEN, [text], show=False)
    with_states = contents(folder)
    for name, found in contents(tmp_path).items():
        if name.endswith("jsonl"):
            assert found == with_states[name]
    with pytest.raises(ConfigError, match="made without them"):
        kept_states(tmp_path, "train")


def test_a_run_that_broke_off_keeps_the_same_states(session, folder, text, tmp_path):
    make_data(session, replace(CONFIG, chats=6), tmp_path, GIVEN, [text], show=False)
    make_data(session, CONFIG, tmp_path, GIVEN, [text], show=False)
    again, whole = contents(tmp_path), contents(folder)
    assert again.keys() == whole.keys()
    for name in whole:
        if name.endswith("jsonl"):
            assert again[name] == whole[name]
        else:  # rows of a batch of other rows may differ in the last bits
            for column, values in load_file(folder / name).items():
                found = load_file(tmp_path / name)[column]
                torch.testing.assert_close(found.float(), values.float(), atol=4e-3, rtol=4e-3)


def test_heads_read_kept_states_in_batches(folder):
    kept = kept_states(folder, "train")
    stream = Shuffled(kept, 16, seed=0)
    seen = torch.cat([stream.chosen(i) for i in range(stream.per_epoch)])
    assert len(seen.unique()) == len(seen) > len(kept) - 16
    assert stream.batch(0)["hidden"].shape == (16, 2, 64)


def test_more_states_than_allowed_are_refused_before_any_work(session, text, tmp_path):
    config = replace(CONFIG, chats=100_000, new_tokens=1000, features_gib=5.0)
    with pytest.raises(ConfigError, match=r"would take 23\.8\d GiB(.|\n)*features_gib=23\.8"):
        make_data(session, config, tmp_path / "out", show=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", ["last", 2, -3, (0, 7)])
def test_a_layer_that_is_not_there_is_refused(wrong, session, tmp_path):
    with pytest.raises(ConfigError, match="layers 0 to 1"):
        make_data(session, replace(CONFIG, features=wrong), tmp_path / "out", GIVEN, show=False)
    assert not (tmp_path / "out").exists()


def test_states_that_float16_cannot_tell_are_refused(session):
    states = States.of(session, "final")
    with pytest.raises(CapabilityError, match="float16"):
        states.kept(torch.tensor([1e6]))


def test_states_are_counted_of_whole_shards(session, tmp_path):
    """A folder with one chat more than a shard has gets two shards."""
    config = replace(CONFIG, chats=6001, shard=6000, new_tokens=1000, features_gib=1.0)
    with pytest.raises(ConfigError, match=r"would take 2\.8\d GiB"):
        make_data(session, config, tmp_path / "out", show=False)
