"""Sorted drafts: exits that learn the laws of several targets, and when they are taken."""

import copy
import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import foretoken
from foretoken.errors import ConfigError
from foretoken.lm.draft_exits import NAME, NEVER, Exits, read
from foretoken.lm.views.sorted_exits import SortedExits
from foretoken.training.dataset.making import DataConfig, make_data
from foretoken.training.dataset.stream import ChatStream
from foretoken.training.drafts import sorting
from foretoken.training.drafts.exit_policies import forced, policies
from foretoken.training.drafts.making import make_draft
from foretoken.training.drafts.measuring import EngineAcceptance
from foretoken.training.drafts.sorting import SortedConfig, make_sorted
from foretoken.training.objectives.sorted_laws import SortedLaws
from foretoken.training.objectives.sparse_laws import SparseLaws

TEXTS = DataConfig(
    chats=32, shard=16, new_tokens=24, held_out=0.2, laws=6, repeated=1.0, temperatures=(0.0, 1.0)
)
CONFIG = SortedConfig(
    shape=(64, 3), exits=(1, 2, 3), vocabulary=200, epochs=6.0, minutes=None, tokens=256,
    row_tokens=64, evaluations=2, held_out=2, precision="no",
)  # fmt: skip


@pytest.fixture(scope="module")
def session(tiny_pair, byte_tokenizer):
    with foretoken.load(tiny_pair[0], "plain", tokenizer=byte_tokenizer) as made:
        yield made


@pytest.fixture(scope="module")
def second(tiny_pair, byte_tokenizer):
    """Another target with the same tokenizer: the first one, disturbed."""
    model = copy.deepcopy(tiny_pair[0])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    with foretoken.load(model, "plain", tokenizer=byte_tokenizer) as made:
        yield made


@pytest.fixture(scope="module")
def texts(session, second, tmp_path_factory):
    given = [f"in the {n} rain on the {n * 7 % 13} train" for n in range(32)]
    folders = []
    for target in (session, second):
        folders.append(tmp_path_factory.mktemp("texts"))
        make_data(target, TEXTS, folders[-1], given, show=False)
    return folders


@pytest.fixture(scope="module")
def config(texts):
    return replace(CONFIG, also=str(texts[1]))


@pytest.fixture(scope="module")
def draft(session, texts, config, tmp_path_factory):
    out = tmp_path_factory.mktemp("sorted")
    return out, make_sorted(session, config, texts[0], out, source="tiny", show=False)


def loss_of_exits(folder, texts):
    """Held-out loss behind each layer of a draft on disk."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = json.loads((folder / "draft_vocabulary.json").read_text())["tokens"]
    judge = SortedLaws.at((1, 2, 3), torch.tensor(tokens), model.config.vocab_size, 0.0)
    stream = ChatStream(texts, "valid", tokens=1024, row_tokens=64, pad=0, seed=0)
    with torch.no_grad():
        return [float(loss) for loss, _ in judge.of_each(model, stream.batch(0))]


def test_each_exit_is_judged_as_a_draft_of_its_layers(texts, session):
    model = copy.deepcopy(session.target.model)
    layers, vocab = model.config.num_hidden_layers, model.config.vocab_size
    batch = ChatStream(tuple(texts), "train", tokens=256, row_tokens=64, pad=0, seed=0).batch(0)
    exits = (1, layers)
    together = SortedLaws.at(exits, torch.arange(vocab), vocab, 0.1)
    loss, _ = together(model, batch, random.Random(0))
    alone = SparseLaws.over(torch.arange(vocab), vocab, 0.1)
    losses = []
    for count in exits:
        part = copy.deepcopy(model)
        part.model.layers = part.model.layers[:count]
        part.config.num_hidden_layers = count
        losses.append(alone(part, batch, random.Random(0))[0])
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    loss.backward()
    assert all(weight.grad is not None for weight in model.model.layers[0].parameters())


def test_exits_are_ordered_and_far_better_than_those_of_an_ordinary_draft(
    draft, texts, session, config, tmp_path
):
    plain = make_draft(session, config, texts[0], tmp_path, source="tiny", show=False)
    assert plain["shape"]["layers"] == 3
    untuned, found = (loss_of_exits(f, tuple(texts)) for f in (tmp_path, draft[0]))
    assert found[2] < found[0] + 0.02  # deeper exits know no less
    assert found[0] < untuned[0] - 0.1
    assert found[1] < untuned[1]
    assert found[2] < untuned[2] + 0.3


def test_the_card_and_the_file_name_exits_and_what_they_reach(draft, session):
    out, notes = draft
    assert read(out / NAME, 3).layers == (1, 2, 3)
    assert [one["layers_per_token"] for one in notes["each"]] == [1.0, 2.0, 3.0]
    costs = [one["cost"] for one in notes["each"]]
    assert all(cost > 0 for cost in costs)
    both = [*notes["each"], *notes["policies"]]
    best = max(both, key=lambda one: one["estimated_speed_up"])
    assert best["thresholds"] == notes["exits"]["thresholds"]
    at_all = [one for one in notes["policies"] if one["thresholds"][1] <= 1]
    deep = [one["layers_per_token"] for one in at_all]
    assert deep[0] <= deep[-1] <= 3.0
    told = (out / "README.md").read_text()
    assert "## Exits" in told
    assert "layers per token" in told
    assert json.loads((out / "card.json").read_text())["settings"]["exits"] == [1, 2, 3]


def test_one_draft_serves_both_targets_and_changes_no_text(draft, session, second):
    prompts = ["in the rain", "on a train there", "other"]
    for target in (session, second):
        plain = [r.tokens for r in target.generate(prompts, 32)]
        for thresholds in (None, 0.3, (0.0, 0.0), (NEVER, 0.2)):
            with foretoken.load(
                target.target.model,
                "chain",
                draft=draft[0],
                tokenizer=target.tokenizer,
                depth=3,
                draft_thresholds=thresholds,
            ) as fast:
                assert [r.tokens for r in fast.generate(prompts, 32)] == plain
                view = fast.draft.lm
                assert isinstance(view, SortedExits)


@pytest.mark.slow
def test_a_run_that_broke_off_ends_with_the_same_weights(session, texts, draft, config, tmp_path):
    real, seen = EngineAcceptance.__call__, []

    def failing(self, model):
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(self, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineAcceptance, "__call__", failing)
        with pytest.raises(KeyboardInterrupt):
            make_sorted(session, config, texts[0], tmp_path, source="tiny", show=False)
    assert not (tmp_path / NAME).exists()
    make_sorted(session, config, texts[0], tmp_path, source="tiny", show=False)
    one, other = (
        AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (tmp_path, draft[0])
    )
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=0, rtol=0)


def test_policies_cover_every_exit_alone_and_are_forced_to_be_priced():
    exits = Exits((1, 2, 4), (0.5, 0.5))
    tried = list(policies(exits))
    assert [one.asked.layers for one in tried[:3]] == [(1,), (2,), (4,)]
    assert {one.asked.layers for one in tried[3:]} == {(1, 2, 4), (1, 4)}
    assert forced(exits, (1, 2, 4), 4).thresholds == (1.0, 1.0)
    assert forced(exits, (1, 4), 4).thresholds == (1.0, NEVER)
    assert forced(exits, (1, 2, 4), 2).thresholds == (1.0, 0.0)


def test_thresholds_that_were_asked_for_are_kept():
    config = SortedConfig(shape=(64, 4), thresholds=(0.5, 0.25))
    assert config.exits_of(4) == Exits((1, 2, 4), (0.5, 0.25))
    assert SortedConfig().exits_of(6).layers == (2, 4, 6)
    assert SortedConfig().exits_of(2).layers == (1, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exits": (4, 2)}, "ascending"),
        ({"exits": (3,)}, "two ascending"),
        ({"thresholds": (-1.0,)}, "0 or more"),
        ({"thresholds": (0.5,), "exits": (1, 2, 3)}, "every exit but the last"),
    ],
)
def test_exits_that_cannot_be_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        SortedConfig(**options)


def test_exits_that_do_not_fit_the_shape_are_refused():
    with pytest.raises(ConfigError, match="behind all layers"):
        SortedConfig(exits=(1, 2)).exits_of(3)
    with pytest.raises(ConfigError, match="behind all layers"):
        SortedConfig().exits_of(1)


def test_texts_of_another_tokenizer_or_none_are_refused(session, texts, config, tmp_path):
    given = {"source": "tiny", "show": False}
    with pytest.raises(ConfigError, match="there are none"):
        make_sorted(session, replace(config, also=str(tmp_path)), texts[0], tmp_path, **given)
    line = {"kind": "a", "temperature": 0.0, "prompt": [1, 9999], "answer": []}
    (tmp_path / "train-000000.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match="the token 9999"):
        make_sorted(session, replace(config, also=str(tmp_path)), texts[0], tmp_path, **given)


def test_texts_of_another_tokenizer_with_as_many_tokens_are_refused(
    session, texts, config, tmp_path
):
    shutil.copytree(texts[1], tmp_path / "also")
    card = tmp_path / "also" / "card.json"
    told = json.loads(card.read_text())
    told["vocabulary"]["digest"] = "another"
    card.write_text(json.dumps(told))
    config = replace(config, also=str(tmp_path / "also"))
    with pytest.raises(ConfigError, match="another vocabulary"):
        make_sorted(session, config, texts[0], tmp_path / "out", show=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("laws", "said"), [(0, "0 tokens are kept"), (3, "3 in ")])
def test_texts_without_laws_or_with_fewer_than_others_are_refused(
    laws, said, session, texts, config, tmp_path
):
    """Without laws a tenth of a label was learned, or nothing."""
    few = replace(TEXTS, chats=8, shard=8, new_tokens=8, laws=laws)
    made, out = tmp_path / "made", tmp_path / "out"
    make_data(session, few, made, [f"on the {n} train" for n in range(8)], show=False)
    with pytest.raises(ConfigError, match=rf"{said}(.|\n)*train data --set laws="):
        make_sorted(session, config, made, out, show=False)
    if laws:
        said = "3 tokens are kept of each law beside them, and 6 in"
    with pytest.raises(ConfigError, match=said):
        make_sorted(session, replace(config, also=str(made)), texts[0], out, show=False)
    assert not out.exists()


def test_exits_learn_no_token_that_a_draft_wrote(session, texts, config, tmp_path, monkeypatch):
    """Of one folder of several."""

    def told(model, objective, *rest, **named):
        raise KeyError(objective.hard)

    shutil.copytree(texts[1], tmp_path / "also")
    plan = tmp_path / "also" / "plan.json"
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "writer": "draft"}))
    monkeypatch.setattr(sorting, "fit", told)
    for also, hard in ((texts[1], 0.1), (tmp_path / "also", 0.0)):
        with pytest.raises(KeyError, match=str(hard)):
            make_sorted(
                session, replace(config, also=str(also)), texts[0], tmp_path / "out", show=False
            )


@pytest.mark.slow
def test_ordinary_text_is_learned_first(session, tmp_path):
    story = tmp_path / "story.txt"
    story.write_text(" ".join(f"on the train {n} are {n * n % 23} others." for n in range(60)))
    few = replace(TEXTS, chats=16, shard=16, text_window=64)
    given = [f"in the {n} rain on the {n * 7 % 13} train" for n in range(16)]
    make_data(session, few, tmp_path / "data", given, [str(story)], show=False)
    config = replace(CONFIG, epochs=1.0, evaluations=1, text_share=0.5)
    notes = make_sorted(session, config, tmp_path / "data", tmp_path / "out", show=False)
    assert notes["on_text"]["steps"] > 0 < notes["steps"]
    assert list(tmp_path.glob("out/training/*/text/step-*.pt"))
