"""How a draft is trained beside the plain way: on ordinary text first, from a draft that exists,
with laws that nobody kept, with figures for TensorBoard; and how such runs fail.
"""

import random
import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

import foretoken
from foretoken.errors import CheckpointError, ConfigError
from foretoken.training import checkpoint, recipes
from foretoken.training.attention import hurried
from foretoken.training.dataset.making import DataConfig, make_data
from foretoken.training.dataset.records import every_chat
from foretoken.training.dataset.stream import ChatStream
from foretoken.training.drafts import learning
from foretoken.training.drafts.making import DraftConfig, make_draft, stages
from foretoken.training.drafts.words import mass
from foretoken.training.objectives.asked_laws import AskedLaws
from foretoken.training.objectives.sparse_laws import SparseLaws
from foretoken.training.online.replay import OnlineConfig

TEXTS = DataConfig(
    chats=40, shard=40, new_tokens=24, held_out=0.2, laws=16, repeated=1.0,
    temperatures=(0.0, 1.0), text_window=64,
)  # fmt: skip
CONFIG = DraftConfig(
    shape=(64, 1), vocabulary=200, epochs=6.0, minutes=None, tokens=256, row_tokens=64,
    evaluations=2, held_out=4, precision="no", text_share=0.5,
)  # fmt: skip
GIVEN = [f"in the {n} rain on the {n * 7 % 13} train" for n in range(40)]


@pytest.fixture(scope="module")
def session(tiny_pair, byte_tokenizer):
    # Kernels chosen by measurement may round otherwise, and the drawn texts hang on it.
    whole = {"kernels": "dense", "tokenizer": byte_tokenizer}
    with foretoken.load(tiny_pair[0], "plain", **whole) as made:
        yield made


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(
        " ".join(f"on the train {n} are {n * n % 23} others in rain." for n in range(80))
    )
    return str(path)


@pytest.fixture(scope="module")
def texts(session, story, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    make_data(session, TEXTS, folder, GIVEN, [story], show=False)
    return folder


@pytest.fixture(scope="module")
def draft(session, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("draft")
    return out, make_draft(session, CONFIG, texts, out, show=False)


@pytest.fixture(scope="module")
def answers_alone(session, texts, tmp_path_factory):
    """What is noted of a draft that has read no text first."""
    out = tmp_path_factory.mktemp("answers")
    return make_draft(session, replace(CONFIG, text_share=0.0), texts, out, show=False)


def test_a_draft_learns_text_first_and_then_the_targets_answers(draft):
    _, notes = draft
    assert notes["on_text"]["steps"] > 5 < notes["steps"]
    assert notes["on_text"]["held_out"][-1][1] < notes["on_text"]["first_loss"] - 0.3
    assert notes["held_out"][-1][1] < notes["held_out"][0][1]


def test_text_learned_first_is_not_lost_for_the_answers(draft, answers_alone):
    """The loss on answers begins lower than that of a draft that has read nothing."""
    assert "on_text" not in answers_alone
    assert draft[1]["first_loss"] < answers_alone["first_loss"] - 0.1


def test_text_alone_is_enough_for_a_draft(session, story, tmp_path):
    make_data(session, replace(TEXTS, chats=0), tmp_path / "data", texts=[story], show=False)
    prompts = learning.held_out(tmp_path / "data", 4)
    assert len(prompts) > 1
    assert all(len(prompt) == 32 for prompt in prompts)
    notes = make_draft(session, CONFIG, tmp_path / "data", tmp_path / "out", show=False)
    assert notes["held_out"][-1][1] < notes["first_loss"] - 0.3
    assert len(notes["measured"]) == 2


def test_a_single_window_beside_chats_is_no_stage(session, story, tmp_path):
    """It is not held out, and nothing is left to judge by."""
    few = replace(TEXTS, chats=8, text_tokens=64)
    make_data(session, few, tmp_path, GIVEN[:8], [story], show=False)
    assert [len(list(every_chat(tmp_path, of, text=True))) for of in ("train", "valid")] == [1, 0]
    assert stages(tmp_path, 0.5) == [("run", False, 1.0)]


def test_chats_and_text_are_not_mixed(texts):
    options = {"tokens": 256, "row_tokens": 64, "pad": 0, "seed": 0}
    for text in (False, True):
        stream = ChatStream(texts, "train", text=text, **options)
        found = [len(one.answer) for one in every_chat(texts, "train", text=text)]
        told = sum(int(stream.batch(i)["weights"].sum()) for i in range(stream.per_epoch))
        assert told == sum(found)


@pytest.mark.slow
def test_a_killed_run_of_two_stages_goes_on(session, texts, draft, tmp_path, monkeypatch):
    whole, seen = learning.EngineAcceptance.__call__, []

    def failing(self, model):
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return whole(self, model)

    with monkeypatch.context() as patch:
        patch.setattr(learning.EngineAcceptance, "__call__", failing)
        with pytest.raises(KeyboardInterrupt):
            make_draft(session, CONFIG, texts, tmp_path, show=False)
    again = make_draft(session, CONFIG, texts, tmp_path, show=False)
    for one, other in ((again, draft[1]), (again["on_text"], draft[1]["on_text"])):
        assert one["steps"] == other["steps"]
        assert one["held_out"] == other["held_out"]


def test_a_draft_that_exists_is_continued(session, texts, draft, answers_alone, tmp_path):
    """It begins where it ended, not where new weights begin: losses of one and the same batch."""
    config = replace(CONFIG, shape=None, text_share=0.0, epochs=1.0)
    notes = make_draft(session, config, texts, tmp_path, start=draft[0], show=False)
    assert notes["shape"] == draft[1]["shape"]
    assert notes["first_loss"] == pytest.approx(draft[1]["held_out"][-1][1], abs=0.5)
    assert notes["first_loss"] < answers_alone["first_loss"] - 0.3
    assert notes["start"] == str(draft[0])
    weights = [AutoModelForCausalLM.from_pretrained(at).state_dict() for at in (tmp_path, draft[0])]
    assert not all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_draft_of_any_shape_is_continued(
    session, texts, draft, make_llama, byte_tokenizer, tmp_path
):
    """Also one with fewer key heads than query heads, whose attention `hurry` does not know."""
    make_llama(len(byte_tokenizer), seed=3).save_pretrained(tmp_path / "other")
    config = replace(CONFIG, shape=None, text_share=0.0, epochs=1.0)
    notes = make_draft(
        session, config, texts, tmp_path / "out", start=tmp_path / "other", show=False
    )
    assert notes["shape"]["layers"] == 2
    assert not hurried(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert hurried(AutoModelForCausalLM.from_pretrained(draft[0]))
    assert notes["held_out"][-1][1] < notes["first_loss"]


def test_a_draft_that_cannot_be_continued_is_refused(session, texts, draft, make_llama, tmp_path):
    make_llama(300).save_pretrained(tmp_path / "other")
    plain = replace(CONFIG, shape=None)
    with pytest.raises(ConfigError, match="300 tokens and the target 265"):
        make_draft(session, plain, texts, tmp_path / "out", start=tmp_path / "other", show=False)
    with pytest.raises(ConfigError, match="64 wide and has 1 layers"):
        config = replace(CONFIG, shape=(128, 2))
        make_draft(session, config, texts, tmp_path / "out", start=draft[0], show=False)
    assert not (tmp_path / "out" / "config.json").exists()


def test_starting_over_deletes_nothing_where_a_draft_is_refused(
    session, texts, draft, make_llama, byte_tokenizer, tmp_path
):
    earlier = tmp_path / "out" / "training" / "earlier" / "step-00000001.pt"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("weights")
    make_llama(300).save_pretrained(tmp_path / "other")
    config = replace(CONFIG, shape=None, text_share=0.0, epochs=0.1, evaluations=1)
    order = recipes.Order(
        session, config, tmp_path / "out", texts, tmp_path / "other", (), "tiny", False, fresh=True
    )
    with pytest.raises(ConfigError, match="300 tokens and the target 265"):
        recipes.cook("draft", order)
    with (
        foretoken.load(make_llama(300), "plain", tokenizer=byte_tokenizer) as foreign,
        pytest.raises(ConfigError, match="another vocabulary"),
    ):
        recipes.cook("draft", replace(order, session=foreign))
    assert earlier.exists()
    recipes.cook("draft", replace(order, draft=draft[0]))
    assert not earlier.exists() and (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("name", ["data", "online"])
def test_prompts_of_another_vocabulary_are_not_replayed(
    name, texts, pair_folders, make_llama, byte_tokenizer, tmp_path
):
    """Their ids are other words to this target."""
    config = {"data": replace(TEXTS, chats=2), "online": OnlineConfig(chats=2)}[name]
    out = tmp_path / "out"
    with (
        foretoken.load(make_llama(300), "plain", tokenizer=byte_tokenizer) as foreign,
        pytest.raises(ConfigError, match=r"taking the prompts of(.|\n)*another vocabulary"),
    ):
        order = recipes.Order(foreign, config, out, texts, pair_folders[1], (), "tiny", False)
        recipes.cook(name, order)
    assert not out.exists()


@pytest.fixture(scope="module")
def unkept(session, tmp_path_factory):
    """The same chats without their laws."""
    folder = tmp_path_factory.mktemp("unkept")
    make_data(session, replace(TEXTS, laws=0), folder, GIVEN, show=False)
    return folder


def test_laws_asked_for_are_those_that_would_have_been_kept(session, texts, unkept):
    options = {"tokens": 256, "row_tokens": 64, "pad": 0, "seed": 0, "packed": False}
    told, asked = (ChatStream(at, "train", **options).batch(1) for at in (texts, unkept))
    assert torch.equal(told["input_ids"], asked["input_ids"])
    assert asked["laws"].shape == (len(told["laws"]), 0)
    vocab = session.target.vocab_size
    sparse = SparseLaws.over(torch.arange(0, vocab, 2), vocab, 0.1)
    live = AskedLaws(sparse, session.target)
    model = session.target.model
    with torch.no_grad():
        losses = [
            float(of(model, batch, random.Random(0))[0])
            for of, batch in ((sparse, told), (live, asked))
        ]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert sparse.count(told) == live.count(asked) > 0


def test_a_draft_learns_laws_that_nobody_kept(session, unkept, tmp_path):
    assert mass(unkept, session.target.vocab_size).sum() > 100
    notes = make_draft(session, replace(CONFIG, epochs=4.0), unkept, tmp_path, show=False)
    assert notes["held_out"][-1][1] < notes["first_loss"] - 0.2


def test_a_loss_that_is_no_number_keeps_the_last_good_checkpoint(session, texts, tmp_path):
    """A rate that grows until the weights overflow."""
    wild = replace(CONFIG, text_share=0.0, vector_rate=1e30, embedding_rate=1e30, matrix_rate=0.0)
    with pytest.raises(
        CheckpointError,
        match=r"the (loss|norm of the gradients) became (.|\n)*lower learning rates",
    ):
        make_draft(session, wild, texts, tmp_path, show=False)
    assert not (tmp_path / "config.json").exists()
    for path in tmp_path.glob("training/*/run/*.pt"):
        state = checkpoint.load(path)
        assert all(torch.isfinite(weight).all() for weight in state["model"].values())


@pytest.mark.skipif(find_spec("tensorboard") is not None, reason="it is installed")
def test_tensorboard_that_is_missing_is_refused_before_any_work():
    with pytest.raises(ConfigError, match=r"lacks tensorboard(.|\n)*foretoken\[tensorboard\]"):
        replace(CONFIG, tensorboard=True)


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_loss_acceptance_and_speed_up(session, texts, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(CONFIG, tensorboard=True, text_share=0.0, epochs=2.0)
    notes = make_draft(session, config, texts, tmp_path, show=False)
    [folder] = tmp_path.glob("training/*/run/tensorboard")
    events = EventAccumulator(str(folder)).Reload()
    assert len(events.Scalars("loss")) == notes["steps"]
    for name in ("acceptance", "estimated_speed_up", "tokens_per_forward"):
        read = [(one.step, one.value) for one in events.Scalars(name)]
        told = [(step, figures[name]) for step, figures in notes["measured"]]
        assert dict(read) == pytest.approx(dict(told))


def test_a_start_that_was_trained_further_is_continued_anew(session, texts, draft, tmp_path):
    config = replace(CONFIG, shape=None, text_share=0.0, epochs=0.1, evaluations=1)
    start, out = tmp_path / "start", tmp_path / "out"
    shutil.copytree(draft[0], start)
    first = make_draft(session, config, texts, out, start=start, show=False)
    shutil.copytree(out, start, ignore=shutil.ignore_patterns("training"), dirs_exist_ok=True)
    second = make_draft(session, config, texts, out, start=start, show=False)
    assert second["first_loss"] != first["first_loss"]
    assert len(list((out / "training").iterdir())) == 2


def test_chats_that_nothing_judges_are_refused_before_text_is_learned(session, texts, tmp_path):
    """Windows of text lie in both splits, and no chat was held out."""
    shutil.copytree(texts, tmp_path / "data")
    for path in (tmp_path / "data").glob("valid-0*"):
        path.unlink()
    with pytest.raises(ConfigError, match="none of the split 'valid' in it, of chats"):
        make_draft(session, CONFIG, tmp_path / "data", tmp_path / "out", show=False)
    assert not list(tmp_path.glob("out/training/*/text/step-*.pt"))
