"""The table of heads: every row resolves, and a new row and a module are all a new head needs."""

import random
import sys
from dataclasses import dataclass

import pytest
import torch
from killed_acceptance import VOCAB, prompts, session
from torch import nn

from foretoken.errors import ConfigError
from foretoken.heads import store
from foretoken.heads.table import HEADS, Head, HeadConfig, resolve
from foretoken.methods import METHODS
from foretoken.training.capture import Capture
from foretoken.training.config import TrainingConfig, configured, options
from foretoken.training.folders import working_alone
from foretoken.training.heads import HeadObjective, run_training


class NextToken(nn.Module):
    """A linear map from a draft model's hidden state to the target's next token."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(HeadConfig):
        rank: int = 4

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.down = nn.Linear(config.hidden_size, config.rank)
        self.up = nn.Linear(config.rank, config.vocab_size)

    def forward(self, hidden):
        return self.up(self.down(hidden))


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts(Capture):
    """The target's own tokens, one-hot, and the tokens after them."""

    def record(self, session, row, text):
        tokens = torch.tensor([row.tokens[-1], *text])
        hidden = nn.functional.one_hot(tokens[:-1], VOCAB).float()
        return {"input_ids": tokens[1:], "hidden": hidden}


@dataclass(frozen=True, kw_only=True, slots=True)
class NextTokenTraining(TrainingConfig):
    rank: int = 6  # of the map


class NextTokenObjective(HeadObjective):
    def shape(self, session):
        return {"rank": self.config.rank}

    def __call__(self, model, batch, rng: random.Random):
        loss = nn.functional.cross_entropy(model(batch["hidden"]), batch["input_ids"])
        return loss, {"loss": loss.detach()}

    def judge(self, head, held_out):
        said = held_out.each(lambda tokens: head(tokens["hidden"]).argmax(-1))
        return {"right": float((said == held_out.column("input_ids")).double().mean())}


@pytest.fixture
def next_token(monkeypatch):
    """A row for the head of this file, which stands where a new module file would."""
    monkeypatch.setitem(sys.modules, "foretoken.heads.next_token", sys.modules[__name__])
    places = {
        "captures": "heads.next_token:Texts",
        "objective": "heads.next_token:NextTokenObjective",
        "config": "heads.next_token:NextTokenTraining",
    }

    def row(**changes):
        given = {"module": "heads.next_token:NextToken", "serves": "chain", **places, **changes}
        monkeypatch.setitem(HEADS, "next", Head(name="next", summary="a toy", **given))

    row()
    return row


def test_a_row_and_a_module_are_all_a_new_head_needs(next_token, tmp_path):
    config = NextTokenTraining(
        prompts=20, new_tokens=12, steps=200, rate=3e-2, rank=5, temperature=0.5
    )
    found = run_training(session(), "next", prompts, config, tmp_path, show=False)
    assert found["figures"]["trained"]["right"] > found["untrained"]["right"] + 0.1
    head, card = store.load(tmp_path, "next")
    assert isinstance(head, NextToken) and head.config.rank == 5
    assert (card.hidden_size, card.vocab_size) == (VOCAB, VOCAB)
    assert card.notes["settings"]["rank"] == 5 and (tmp_path / "loss.png").is_file()


def test_other_options_start_over_on_what_was_captured(next_token, tmp_path):
    small = {"prompts": 20, "new_tokens": 12}
    for rate in (1e-3, 1e-2):
        config = NextTokenTraining(**small, steps=10, rate=rate)
        run_training(session(), "next", prompts, config, tmp_path, show=False)
        assert store.load(tmp_path, "next")[1].notes["settings"]["rate"] == rate
    work = tmp_path / "training"
    assert len(list(work.glob("*/step-00000010.pt"))) == 2
    assert len(list((work / "capture").glob("train-*.safetensors"))) == 2


def test_a_row_without_an_objective_loads_and_says_it_cannot_be_trained_yet(next_token, tmp_path):
    next_token(objective="")
    head = NextToken(NextToken.Config(hidden_size=3, vocab_size=5))
    store.save(tmp_path / "random", "next", head, {"weights": "random"})
    assert store.load(tmp_path / "random", "next")[0].config == head.config
    with pytest.raises(ConfigError, match="cannot be trained yet") as caught:
        run_training(session(), "next", prompts, NextTokenTraining(), tmp_path / "x", show=False)
    assert "acceptance, decision, exits" in caught.value.possible
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("row", HEADS.values(), ids=HEADS)
def test_every_row_resolves_and_every_option_says_what_it_means(row):
    assert issubclass(resolve(row.module), nn.Module)
    assert issubclass(resolve(row.module).Config, HeadConfig)
    assert row.serves in METHODS
    if row.stands_for:  # comes from elsewhere, in the place of one that is trained
        assert HEADS[row.stands_for].trainable and not row.trainable
        return
    assert row.trainable
    assert bool(row.learns) == (row.models == ("target",)), "whether a draft's texts teach it"
    assert issubclass(resolve(row.captures), Capture)
    assert issubclass(resolve(row.objective), HeadObjective)
    config = resolve(row.config)()  # the defaults are good ones
    for option in options(type(config)):
        assert option.meaning, option.name
        assert option.default == getattr(config, option.name)


def test_options_are_checked_by_name_and_type():
    config = configured(NextTokenTraining, {"rank": 3, "rate": 1, "steps": None}, "a toy")
    assert (config.rank, config.rate, config.steps) == (3, 1, None)
    with pytest.raises(ConfigError, match="did you mean rank") as caught:
        configured(NextTokenTraining, {"rnk": 3}, "a toy")
    assert "new_tokens" in caught.value.possible
    for name, wrong in (("rank", "3"), ("rate", "fast"), ("steps", True), ("prompts", None)):
        with pytest.raises(ConfigError, match=f"{name} is a"):
            configured(NextTokenTraining, {name: wrong}, "a toy")


def test_a_config_tells_the_meaning_of_the_field_it_overrides():
    rows = {option.name: option for option in options(resolve(HEADS["decision"].config))}
    assert (rows["batch"].default, rows["batch"].meaning) == (50, "tokens in a step; paper 50")
    assert rows["seed"].meaning == "of prompts, samples and weights"
    assert rows["model"].type == "soft or hard"


def test_a_torch_without_muon_is_told_of_before_anything_is_captured(
    next_token, tmp_path, monkeypatch
):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    config = NextTokenTraining(prompts=4, new_tokens=4, steps=2, matrix_rate=0.02)
    with pytest.raises(ConfigError, match=r"no Muon; 2\.9 and later do"):
        run_training(session(), "next", prompts, config, tmp_path, show=False)
    assert not (tmp_path / "training").exists()


@pytest.mark.parametrize(("name", "fresh"), [("run", True), (".", False)])
def test_where_a_head_is_learning_another_run_is_refused(name, fresh, next_token, tmp_path):
    folder = tmp_path / "training" / name
    config = NextTokenTraining(prompts=4, new_tokens=4, steps=2)
    with working_alone(folder):
        (folder / "step-00000001.pt").write_text("weights")
        with pytest.raises(ConfigError, match="another run is at work there"):
            run_training(session(), "next", prompts, config, tmp_path, fresh=fresh, show=False)
    assert [path.name for path in folder.iterdir()] == ["step-00000001.pt"]
