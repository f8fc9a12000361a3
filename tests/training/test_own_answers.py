"""On-policy texts: a draft answers, and the target's laws along its words are kept."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from test_dataset import CONFIG, talker

import foretoken
from foretoken.cli.train import check_written
from foretoken.errors import ConfigError
from foretoken.heads.table import HEADS
from foretoken.lm import draft_vocabulary
from foretoken.training.config import configured
from foretoken.training.dataset.card import CARD, PLAN, written_by_draft
from foretoken.training.dataset.making import DataConfig, run
from foretoken.training.dataset.records import read_told, shards
from foretoken.training.drafts import making
from foretoken.training.drafts.making import DraftConfig
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


def test_another_draft_does_not_go_on_in_a_folder(session, tiny_pair, draft, folder, tmp_path):
    """A folder from before its plan named the draft is taken as it is."""
    other, older = copy.deepcopy(tiny_pair[1]), tmp_path / "older"
    with torch.no_grad():
        other.model.norm.weight.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="made with another draft"):
        run(asked(session, folder, tmp_path / "other"))
    run(asked(session, folder, draft))
    shutil.copytree(folder, older)
    plan = json.loads((older / PLAN).read_text())
    del plan["draft"]
    (older / PLAN).write_text(json.dumps(plan))
    run(asked(session, older, tmp_path / "other"))


def test_the_card_names_the_draft_that_wrote(draft, folder, tmp_path):
    card = json.loads((folder / CARD).read_text())
    assert card["writer"] == "draft" and card["draft"]["name"] == str(draft)
    assert str(draft) in card["made by"] and str(draft) in (folder / "README.md").read_text()
    assert written_by_draft(folder) and not written_by_draft(tmp_path)
    shutil.copy(folder / PLAN, tmp_path)
    assert written_by_draft(tmp_path), "of before cards said so"


def test_a_draft_learns_no_written_token_of_another_draft(
    session, folder, tmp_path, monkeypatch, caplog
):
    seen, fit = [], making.fit
    monkeypatch.setattr(
        making, "fit",
        lambda model, objective, *rest, **named: (
            seen.append(objective), fit(model, objective, *rest, **named)
        )[1],
    )  # fmt: skip
    config = DraftConfig(
        shape=(64, 1), vocabulary=200, epochs=0.5, minutes=None, tokens=256, row_tokens=64,
        evaluations=1, held_out=2, precision="no",
    )  # fmt: skip
    assert config.hard and making.by_laws_alone(config, tmp_path) is config
    notes = making.make_draft(session, config, folder, tmp_path / "out", show=False)
    assert [objective.hard for objective in seen] == [0.0]
    assert notes["settings"]["hard"] == 0.0
    assert caplog.text.count("hard=0") == 1


def test_heads_that_learn_written_tokens_refuse_those_of_a_draft(folder, tmp_path):
    for name in ("medusa", "chimera", "ctc", "longspec"):
        with pytest.raises(ConfigError, match=r"a draft wrote(.|\n)*the target's own"):
            check_written(name, folder, ())
        check_written(name, tmp_path, ())
    check_written("hydra", folder, ())


def test_heads_that_learn_laws_are_named_where_written_tokens_are_refused(folder):
    tokens, laws = (
        [row.name for row in HEADS.values() if row.learns == kind] for kind in ("tokens", "laws")
    )
    for name in tokens:
        with pytest.raises(ConfigError, match=f"learns its laws: {', '.join(laws)}."):
            check_written(name, folder, ())
    for name in laws:
        check_written(name, folder, ())


def test_a_folder_without_chats_is_none_of_prompts(session, tmp_path):
    with pytest.raises(ConfigError, match="none of the split 'train'"):
        run(asked(session, tmp_path / "out", None, CONFIG, data=tmp_path, prompts=()))
    assert not (tmp_path / "out").exists()


def test_a_list_of_one_is_said_by_its_value():
    made = configured(DataConfig, {"temperatures": 1.0, "features": "final"}, "data")
    assert made.temperatures == (1.0,) and made.features == "final"
