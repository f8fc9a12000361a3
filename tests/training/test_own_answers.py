"""On-policy texts: a draft answers, and the target's laws along its words are kept."""

import copy
from dataclasses import replace

import pytest
import torch
from test_dataset import CONFIG, talker

import foretoken
from foretoken.errors import ConfigError
from foretoken.lm import draft_vocabulary
from foretoken.training.config import configured
from foretoken.training.dataset.making import DataConfig, run
from foretoken.training.dataset.records import read_told, shards
from foretoken.training.recipes import Order

WRITTEN = replace(CONFIG, writer="draft", chats=40, temperatures=(0.0, 1.0), laws=61)


@pytest.fixture(scope="module")
def session(tiny_pair, byte_tokenizer):
    with foretoken.load(
        talker(tiny_pair[0]), "plain", tokenizer=copy.deepcopy(byte_tokenizer), max_rows=16
    ) as made:
        yield made


def asked(session, out, draft, config=WRITTEN, **changes):
    prompts = tuple(f"The question number {i} is" for i in range(30))
    given = {"data": None, "prompts": prompts, "source": "tiny", "show": False}
    return Order(session, config, out, draft=draft, **{**given, **changes})


@pytest.fixture(scope="module")
def draft(tiny_pair, tmp_path_factory):
    """A directory with a draft that scores a few tokens only."""
    path = tmp_path_factory.mktemp("draft")
    tiny_pair[1].save_pretrained(path)
    width = tiny_pair[1].config.vocab_size
    draft_vocabulary.write(path / draft_vocabulary.NAME, range(0, width, 2), width)
    return path


@pytest.fixture(scope="module")
def folder(session, draft, tmp_path_factory):
    out = tmp_path_factory.mktemp("own")
    run(asked(session, out, draft))
    return out


def told(folder):
    return [one for path in shards(folder, "train") for one in read_told(path)]


def test_the_draft_writes_and_the_target_says_its_laws(session, tiny_pair, folder):
    small, large = tiny_pair[1], session.target.model
    greedy = 0
    for chat, laws in told(folder):
        assert all(token % 2 == 0 for token in chat.answer), "tokens that the draft scores"
        ids = torch.tensor([[*chat.prompt, *chat.answer]])
        with torch.no_grad():
            at = slice(len(chat.prompt) - 1, -1)
            own, logits = small(ids).logits[0, at], large(ids).logits[0, at].float()
        truth = logits.log_softmax(-1).gather(-1, laws.tokens.long())
        torch.testing.assert_close(laws.log_probs.float(), truth, atol=5e-3, rtol=1e-2)
        if chat.temperature == 0:
            assert (2 * own[:, ::2].argmax(-1)).tolist() == chat.answer
            greedy += len(chat.answer)
    assert greedy > 50


def test_a_run_that_broke_off_ends_with_the_same_texts(session, draft, folder, tmp_path):
    short = replace(WRITTEN, shard=10)
    run(asked(session, tmp_path / "whole", draft, short))
    run(asked(session, tmp_path / "begun", draft, replace(short, chats=10)))
    run(asked(session, tmp_path / "begun", draft, short))
    found = [
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*-*")}
        for name in ("whole", "begun")
    ]
    assert len(found[0]) > 4 and found[0] == found[1]


def test_prompts_of_a_folder_are_answered_anew(session, draft, folder, tmp_path):
    run(asked(session, tmp_path, draft, data=folder, prompts=()))
    before = {tuple(chat.prompt) for chat, _ in told(folder)}
    after = [tuple(chat.prompt) for chat, _ in told(tmp_path)]
    assert after and before.issuperset(after)


def test_without_a_draft_of_the_same_vocabulary_it_is_refused(session, tiny_pair, tmp_path):
    with pytest.raises(ConfigError, match="no draft was named"):
        run(asked(session, tmp_path / "out", None))
    config = copy.deepcopy(tiny_pair[1].config)
    config.vocab_size += 5
    type(tiny_pair[1])(config).save_pretrained(tmp_path / "wider")
    with pytest.raises(ConfigError, match="the target cannot read"):
        run(asked(session, tmp_path / "out", tmp_path / "wider"))
    assert not list(tmp_path.glob("out/train-*"))


def test_a_list_of_one_is_said_by_its_value():
    made = configured(DataConfig, {"temperatures": 1.0, "features": "final"}, "data")
    assert made.temperatures == (1.0,) and made.features == "final"
