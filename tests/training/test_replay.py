"""`foretoken train online`: prompts as traffic, both drafts compared, killed and gone on with."""

import copy
import json

import pytest
import torch
from typer.testing import CliRunner

import foretoken
from foretoken.cli.app import app
from foretoken.engine.session import Session
from foretoken.errors import CheckpointError, ConfigError
from foretoken.training.dataset.making import DataConfig, make_data
from foretoken.training.online import replay
from foretoken.training.online.replay import OnlineConfig
from foretoken.training.online.telling import Fared, figures, moving
from foretoken.training.recipes import Order

TEXTS = tuple(f"the {n} train in the rain" for n in range(12))
QUICK = {
    "share": 1.0, "accepted": 0.3, "rate": 1e-3, "interval": 2, "new_tokens": 12,
    "save_every": 4, "depth": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def session(tiny_pair, byte_tokenizer):
    with foretoken.load(tiny_pair[0], "plain", tokenizer=byte_tokenizer) as made:
        yield made


def order(session, draft, out, data=None, prompts=TEXTS, **changes):
    config = OnlineConfig(**{**QUICK, **changes})
    return Order(session, config, out, data, draft, prompts, "tiny", False)


def learned(folder):
    return foretoken.training.drafts.distilling.load_model(folder, dtype=torch.float32)


def test_a_replay_writes_a_draft_a_card_and_curves(session, tiny_pair, pair_folders, tmp_path):
    before = copy.deepcopy(tiny_pair[1].state_dict())
    notes = replay.run(order(session, pair_folders[1], tmp_path))
    assert notes["learning"]["requests"] == notes["frozen"]["requests"] == 12
    assert notes["steps"] > 4 and notes["recipe"] == "online"
    assert json.loads((tmp_path / "card.json").read_text())["steps"] == notes["steps"]
    assert next((tmp_path / "training").glob("*/acceptance.png")).stat().st_size > 1000
    assert "learned from 12 requests" in (tmp_path / "README.md").read_text()
    weights = learned(tmp_path).state_dict()
    assert any(not torch.equal(weights[name], before[name].bfloat16().float()) for name in weights)
    with foretoken.load(session.target.model, "chain", tmp_path, tokenizer=session.tokenizer) as s:
        one, other = (x.generate(TEXTS[0], 20, temperature=0.0).tokens for x in (s, session))
    assert one == other


def test_a_killed_replay_goes_on_to_the_same_draft(session, pair_folders, tmp_path, monkeypatch):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    replay.run(order(session, pair_folders[1], whole))
    generate, calls = Session.generate, []

    def dying(self, *given, **named):
        calls.append(given)
        if len(calls) == 14:  # in the seventh request; the state is of the fourth
            raise KeyboardInterrupt
        return generate(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "generate", dying)
        with pytest.raises(KeyboardInterrupt):
            replay.run(order(session, pair_folders[1], parted))
    assert not (parted / "config.json").exists()
    calls.clear()
    notes = replay.run(order(session, pair_folders[1], parted))
    assert notes["learning"]["requests"] == 12
    one, other = learned(whole).state_dict(), learned(parted).state_dict()
    for name in one:
        torch.testing.assert_close(one[name], other[name])
    journal = next((parted / "training").glob("*/requests.json"))
    journal.write_text("{")
    with pytest.raises(CheckpointError, match="journal"):
        replay.run(order(session, pair_folders[1], parted))


def test_prompts_come_from_a_folder_of_texts_too(session, pair_folders, tmp_path):
    config = DataConfig(chats=10, shard=10, new_tokens=8, held_out=0.2, laws=4, repeated=1.0)
    make_data(session, config, tmp_path / "texts", TEXTS[:10], show=False)
    asked = order(session, pair_folders[1], tmp_path / "out", tmp_path / "texts", (), chats=5)
    assert len(replay.read_prompts(asked)) == 5


def test_each_topic_has_a_draft_of_its_own(session, pair_folders, tmp_path):
    replay.run(order(session, pair_folders[1], tmp_path, topics=2))
    assert [(tmp_path / f"topic-{i}" / "config.json").is_file() for i in range(2)] == [True, True]


def test_what_cannot_be_replayed_is_refused(session, pair_folders, tmp_path):
    with pytest.raises(ConfigError, match="without a prompt"):
        replay.run(order(session, pair_folders[1], tmp_path, prompts=()))
    with pytest.raises(ConfigError, match="without a draft"):
        replay.run(order(session, None, tmp_path))
    with pytest.raises(ConfigError):
        OnlineConfig(chats=0)


def test_the_command_replays_a_file_of_prompts(pair_folders, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    flags = [flag for name, value in QUICK.items() for flag in ("--set", f"{name}={value}")]
    ran = CliRunner().invoke(
        app,
        ["train", "online", "--target", str(pair_folders[0]), "--draft", str(pair_folders[1]),
         "--data", str(data), "--out", str(tmp_path / "out"), "--json", *flags],
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["learning"]["requests"] == len(TEXTS)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_moving_average_counts_the_last_requests_alone():
    some = [Fared(a, 10, 5, 2, 1.0) for a in (0, 10, 10, 5)]
    assert moving(some, 2) == [0.0, 0.5, 1.0, 0.75]
    slow = [Fared(5, 10, 5, 2, 2.0)] * 4
    told = figures({"learning": slow, "frozen": some}, 2)
    assert told["speed_beside_frozen"]["all"] == 0.5
    assert told["frozen"]["acceptance"] == 0.625 and told["frozen"]["last_acceptance"] == 0.75
