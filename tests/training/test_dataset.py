"""Training texts: made by a target, in shards that follow from the seed; read as batches."""

import copy
import json
import random
import resource
import shutil
import signal
from dataclasses import replace

import pytest
import torch

import foretoken
from foretoken.errors import CheckpointError, ConfigError
from foretoken.training.dataset import openers
from foretoken.training.dataset.making import DataConfig, make_data
from foretoken.training.dataset.records import (
    Chat,
    every_chat,
    likeliest,
    read_told,
    shards,
    write_shard,
)
from foretoken.training.dataset.stream import ChatStream
from foretoken.training.drafts.learning import beginning, held_out
from foretoken.training.folders import working_alone

CONFIG = DataConfig(
    chats=80, shard=40, prompt_tokens=60, new_tokens=12, held_out=0.2, laws=5, min_p=0.0, rows=16,
    temperatures=(0.0, 1.0), repeated=1.0,
)  # fmt: skip
CHAT = (
    "{% for m in messages %}<turn>{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def session(tiny_pair, byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = CHAT
    with foretoken.load(talker(tiny_pair[0]), "plain", tokenizer=tokenizer, max_rows=16) as made:
        yield made


def talker(model):
    """A random model whose turns end: as often as its most frequent token comes."""
    made, eos = copy.deepcopy(model), model.config.eos_token_id
    with torch.no_grad():
        laws = made(torch.arange(250)[None]).logits[0].softmax(-1)
        made.lm_head.weight[eos] = 0.98 * made.lm_head.weight[laws.mean(0).argmax()]
    return made


@pytest.fixture(scope="module")
def folder(session, tmp_path_factory):
    path = tmp_path_factory.mktemp("texts")
    make_data(session, CONFIG, path, show=False)
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*-*")}


def test_a_run_that_broke_off_ends_with_the_same_texts(session, folder, tmp_path):
    make_data(session, replace(CONFIG, chats=40), tmp_path, show=False)
    assert len(shards(tmp_path, "train")) == 1
    (tmp_path / "train-000001.partial").write_text("half a shard")
    make_data(session, CONFIG, tmp_path, show=False)
    (tmp_path / "train-000001.partial").unlink(missing_ok=True)
    assert contents(tmp_path) == contents(folder)


def test_kept_laws_are_the_targets_at_every_token_of_the_answers(session, folder):
    model = session.target.model
    checked = 0
    for path in shards(folder, "train"):
        for chat, laws in read_told(path):
            ids = torch.tensor([[*chat.prompt, *chat.answer]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(chat.prompt) - 1 : -1].float()
            truth = logits.log_softmax(-1).gather(-1, laws.tokens.long())
            torch.testing.assert_close(laws.log_probs.float(), truth, atol=5e-3, rtol=1e-2)
            if chat.temperature == 0:
                best = laws.tokens.gather(-1, laws.log_probs.float().argmax(-1, keepdim=True))
                assert best[:, 0].tolist() == chat.answer
                checked += len(chat.answer)
    assert checked > 50


@pytest.mark.parametrize("size", [0, 1, 7, 70, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest_tokens_and_their_chances_are_those_of_the_whole_law(size, dtype):
    """None, few, more than C keeps in its list, all; in columns of another tensor, too."""
    logits = (3.0 * torch.randn(5, 600)).to(dtype)[:, 100:400]
    tokens, log_probs = likeliest(logits, size)
    law = logits.float().log_softmax(-1)
    best = law.topk(min(size, 300), -1)[0]
    assert tokens.dtype is torch.int32 and tokens.shape == best.shape
    torch.testing.assert_close(log_probs, best)
    torch.testing.assert_close(law.gather(-1, tokens.long()), best)


def test_no_prompt_comes_twice_and_held_out_ones_are_not_trained_on(folder):
    prompts = [
        tuple(chat.prompt) for split in ("train", "valid") for chat in every_chat(folder, split)
    ]
    assert len(prompts) > 20
    assert len(set(prompts)) == len(prompts)
    assert list(every_chat(folder, "valid"))


def test_prompts_end_where_the_assistant_begins(session, folder):
    for chat in every_chat(folder, "train"):
        text = session.tokenizer.decode(chat.prompt)
        assert text.startswith("<turn>user:")
        assert text.endswith("<turn>assistant:")


def test_another_plan_in_the_same_folder_is_refused(session, folder):
    with pytest.raises(ConfigError, match="another new_tokens"):
        make_data(session, replace(CONFIG, new_tokens=9), folder, show=False)


def test_where_texts_are_made_another_run_is_refused(session, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with working_alone(tmp_path), pytest.raises(ConfigError, match="another run is at work there"):
        make_data(session, CONFIG, tmp_path, fresh=True, show=False)
    assert contents(tmp_path) == contents(folder)


def test_given_prompts_are_answered_in_their_order(session, tmp_path):
    given = [f"question {n}" for n in range(10)]
    config = replace(CONFIG, shard=4, temperatures=(0.0,), held_out=1e-9)
    notes = make_data(session, config, tmp_path, given, show=False)
    texts = [session.tokenizer.decode(chat.prompt) for chat in every_chat(tmp_path, "train")]
    assert texts == [f"<turn>user:{text}<eos><turn>assistant:" for text in given]
    assert notes["splits"]["train"]["kinds"] == {"given": 10}


def test_a_model_without_a_chat_template_writes_documents(tiny_pair, byte_tokenizer, tmp_path):
    with foretoken.load(tiny_pair[0], "plain", tokenizer=byte_tokenizer) as session:
        make_data(session, replace(CONFIG, chats=6, shard=6), tmp_path, show=False)
    chats = list(every_chat(tmp_path, "train"))
    assert {chat.kind for chat in chats} == {"document"}
    assert all(chat.temperature > 0 for chat in chats), "greedy ones would all be the same text"
    judged = [*held_out(tmp_path, 4), *(beginning(chat) for chat in chats[:2])]
    assert all(len(prompt) > 1 for prompt in judged) and judged[0] != judged[-1]
    assert {tuple(chat.prompt) for chat in chats} == {(byte_tokenizer.eos_token_id,)}


def test_a_full_disk_leaves_whole_shards(session, folder, tmp_path):
    make_data(session, replace(CONFIG, chats=40), tmp_path, show=False)
    before = contents(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(CheckpointError, match="shards before this one are whole"):
            make_data(session, CONFIG, tmp_path, show=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert {k: v for k, v in contents(tmp_path).items() if k in before} == before
    assert len(shards(tmp_path, "train")) == 1
    make_data(session, CONFIG, tmp_path, show=False)
    assert contents(tmp_path) == contents(folder)


def stream(folder, **changes):
    options = {"tokens": 256, "row_tokens": 128, "pad": 0, "seed": 3}
    return ChatStream(folder, "train", **{**options, **changes})


def test_every_chat_comes_once_per_epoch_with_its_own_laws(folder):
    chats = {tuple(chat.answer): 0 for chat in every_chat(folder, "train")}
    found = stream(folder)
    for index in range(found.per_epoch):
        batch = found.batch(index)
        told = batch["weights"] > 0
        assert len(batch["laws"]) == len(batch["log_probs"]) == int(told.sum())
        for row, marks in zip(batch["input_ids"], told, strict=True):
            edges = torch.diff(marks.int(), prepend=torch.tensor([0]), append=torch.tensor([0]))
            for begin, end in zip(*((edges == s).nonzero()[:, 0] for s in (1, -1)), strict=True):
                chats[tuple(row[begin:end].tolist())] += 1
    assert set(chats.values()) == {1}


def test_a_batch_follows_from_its_index(folder):
    one, other = stream(folder), stream(folder)
    later = one.per_epoch + 1
    one.batch(0)
    for name, values in one.batch(later).items():
        assert torch.equal(values, other.batch(later)[name])
    assert not all(
        torch.equal(one.batch(i)["input_ids"], one.batch(one.per_epoch + i)["input_ids"])
        for i in range(one.per_epoch)
    )


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there are none"):
        stream(tmp_path)


@pytest.mark.parametrize("count", [2, 9])
def test_of_few_chats_one_is_held_out(session, tmp_path, count):
    """By chance it would be none of them: a share of 0.001 of a handful."""
    config = replace(CONFIG, shard=4, chats=count, held_out=0.001)
    given = [f"question {n}" for n in range(count)]
    notes = make_data(session, config, tmp_path, given, show=False)
    told = [notes["splits"][split]["chats"] for split in ("train", "valid")]
    assert told == [count - 1, 1], "of the first shard alone"
    assert held_out(tmp_path, 4)


def test_a_single_chat_is_learned_from(session, tmp_path):
    make_data(session, replace(CONFIG, chats=1, held_out=0.001), tmp_path, ["one"], show=False)
    assert len(list(every_chat(tmp_path, "train"))) == 1
    with pytest.raises(ConfigError, match=r"split 'valid'(.|\n)*more chats, or pass --fresh"):
        ChatStream(tmp_path, "valid", tokens=256, row_tokens=128, pad=0, seed=3)


def test_prompts_that_no_row_has_room_for_are_told_of(folder):
    whole = [len(chat.prompt) + len(chat.answer) for chat in every_chat(folder, "train")]
    with pytest.raises(ConfigError, match=rf"all {len(whole)} of the split 'train'") as caught:
        stream(folder, row_tokens=4)
    assert "rows of row_tokens=4 hold 8" in caught.value.possible
    enough = -(-min(whole) // 2)
    assert f"{enough} is enough" in caught.value.do and "--set row_tokens=N" in caught.value.do
    assert stream(folder, row_tokens=enough).places


def test_a_prompt_that_gives_a_text_waits_until_there_is_one():
    rng = random.Random(0)
    first = [openers.opened(rng, []) for _ in range(300)]
    assert not any(openers.TEXT in one.text for one in first)
    assert {"summary", "given text"}.isdisjoint(one.kind for one in first)
    text = " ".join(f"word{n}" for n in range(500))
    later = [openers.opened(rng, [text]) for _ in range(300)]
    assert {one.kind for one in later} == {kind.name for kind in openers.KINDS}
    assert all("word0" in one.text for one in later if one.whole)
    assert not any(openers.TEXT in one.text for one in later)
    assert not any(one.text.endswith(" ") for one in later)


@pytest.mark.parametrize(
    "wrong",
    [{"chats": -1}, {"temperatures": ()}, {"held_out": 1.0}, {"min_p": 1.0}, {"repeated": 0.0},
     {"seed": "one"}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        DataConfig(**wrong)


def test_a_target_that_writes_nothing_worth_learning_is_told_of(session, tmp_path):
    told, repeating = replace(CONFIG, repeated=1e-9), [[5, 6, 7, 8] * 4 + [i] for i in range(40)]
    with pytest.raises(ConfigError, match=r"shard of 40 training texts.*\n.*0 prompts were new"):
        make_data(session, told, tmp_path, given=repeating, show=False)
    assert not shards(tmp_path, "train"), "nothing half-written"
    few = replace(told, shard=2, chats=2)
    make_data(session, few, tmp_path / "few", given=repeating[:2], show=False)
    later = [[5, 6 + i] for i in range(40)] + repeating
    make_data(session, replace(CONFIG, repeated=0.5), tmp_path / "later", later, show=False)
    assert len(shards(tmp_path / "later", "train")) == 2, "a later shard may be empty"


def test_prompts_that_the_target_cannot_read_are_left_out(make_llama, byte_tokenizer, tmp_path):
    model = make_llama(len(byte_tokenizer), max_position_embeddings=16)
    config = replace(CONFIG, shard=4, chats=4, new_tokens=4, temperatures=(0.0,), held_out=1e-9)
    with foretoken.load(model, "plain", tokenizer=byte_tokenizer) as short:
        given = [[], "", list(range(40, 57)), list(range(40, 56))]
        make_data(short, config, tmp_path, given, show=False)
    assert [chat.prompt for chat in every_chat(tmp_path, "train")] == [given[-1]]


def test_a_shard_that_fewer_prompts_would_cut_short_is_refused(session, tmp_path):
    """It would count as whole later."""
    config = replace(CONFIG, shard=4, chats=8, temperatures=(0.0,), held_out=1e-9)
    given = [f"question {n}" for n in range(8)]
    make_data(session, config, tmp_path, given, show=False)
    before = contents(tmp_path)
    make_data(session, config, tmp_path, given[:6], show=False)
    for path in tmp_path.glob("*-000001.*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"shard 1 of 4 (.|\n)* 2 alone(.|\n)*multiple of 4"):
        make_data(session, config, tmp_path, given[:6], show=False)
    make_data(session, config, tmp_path, given[:4], show=False)
    make_data(session, config, tmp_path, given, show=False)
    assert contents(tmp_path) == before


def test_a_folder_from_before_each_prompt_was_told_of_goes_on(session, tmp_path):
    config = replace(CONFIG, shard=4, chats=8, temperatures=(0.0,))
    given, plan = [f"question {n}" for n in range(8)], tmp_path / "plan.json"
    make_data(session, config, tmp_path, given, show=False)
    found = json.loads(plan.read_text())
    del found["given"]["each"]
    plan.write_text(json.dumps(found))
    make_data(session, config, tmp_path, given[:5], show=False)
    assert json.loads(plan.read_text())["given"] == found["given"]
    make_data(session, config, tmp_path, given, show=False)
    with pytest.raises(ConfigError, match="another given"):
        make_data(session, config, tmp_path, ["another"], show=False)


def test_more_given_prompts_are_welcome_and_others_refused(session, tmp_path):
    config = replace(CONFIG, shard=4, chats=8, temperatures=(0.0,))
    given = [f"question {n}" for n in range(16)]
    make_data(session, config, tmp_path, given[:8], show=False)
    before = contents(tmp_path)
    make_data(session, replace(config, chats=16), tmp_path, given, show=False)
    after = contents(tmp_path)
    assert before.items() <= after.items() and len(after) > len(before)
    make_data(session, config, tmp_path, given[:8], show=False)
    make_data(session, replace(config, chats=16), tmp_path, given, show=False)
    with pytest.raises(ConfigError, match="another given"):  # its last shard would have room
        make_data(session, replace(config, chats=6), tmp_path / "six", given[:6], show=False)
        make_data(session, replace(config, chats=8), tmp_path / "six", given[:8], show=False)
    for others in ([*given[:7], "another", *given[8:]], ["another", *given[1:5]], []):
        with pytest.raises(ConfigError, match="another given"):
            make_data(session, replace(config, chats=16), tmp_path, others, show=False)


def test_a_run_that_broke_off_knows_no_less_of_prompts_without_an_answer(session, tmp_path):
    """Prompts whose answers are left out are those of no chat: nobody knows of them later."""
    config = replace(CONFIG, shard=6, chats=18, repeated=0.3)
    given = [f"question {n % 7}" for n in range(18)]
    for folder, counts in (("whole", (18,)), ("parts", (6, 12, 18))):
        for count in counts:
            part = replace(config, chats=count)
            make_data(session, part, tmp_path / folder, given[:count], show=False)
    chats = list(every_chat(tmp_path / "whole", "train"))
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")
    assert len({tuple(chat.prompt) for chat in chats}) == len(chats)


@pytest.mark.parametrize("packed", [True, False])
def test_a_chat_whose_prompt_fills_the_row_is_left_out(folder, tmp_path, packed):
    """Nothing of it could be learned, and a batch without a place has no loss."""
    told = [one for path in shards(folder, "train") for one in read_told(path)][:4]
    long = Chat("given", 0.0, [5] * 256, told[0][0].answer)
    write_shard(tmp_path, 0, {"train": [*told, (long, told[0][1])], "valid": []})
    found = stream(tmp_path, packed=packed)
    for index in range(found.per_epoch):
        assert (found.batch(index)["weights"].sum(-1) > 0).all()
    assert len(found.places) == 4


def test_more_shards_than_memory_holds_are_read_once_per_epoch(folder, tmp_path, monkeypatch):
    told = [one for path in shards(folder, "train") for one in read_told(path)][:12]
    for index in range(6):
        write_shard(tmp_path, index, {"train": told[2 * index : 2 * index + 2], "valid": []})
    reads, where = [], "foretoken.training.dataset.stream"
    monkeypatch.setattr(f"{where}.KEPT", 2)
    monkeypatch.setattr(f"{where}.read_told", lambda path: (reads.append(path), read_told(path))[1])
    found, orders = stream(tmp_path, tokens=128, packed=False), []
    for epoch in (0, 1):
        reads.clear()
        found.loaded.clear()
        batches = range(epoch * found.per_epoch, (epoch + 1) * found.per_epoch)
        ids = [found.batch(index)["input_ids"] for index in batches]
        orders.append(list(reads))
        assert sorted(reads) == shards(tmp_path, "train")
        again = stream(tmp_path, tokens=128, packed=False)
        assert all(
            torch.equal(again.batch(index)["input_ids"], one)
            for index, one in zip(batches, ids, strict=True)
        )
    assert orders[0] != orders[1]
