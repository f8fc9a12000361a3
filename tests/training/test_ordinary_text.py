"""Ordinary text as training data: read from files and data sets, scored by the target, resumed."""

import copy
import itertools
import json
import resource
import signal
from dataclasses import replace

import pytest
import torch
from test_dataset import CHAT, contents, talker

import foretoken
from foretoken.errors import CheckpointError, ConfigError
from foretoken.training.dataset import sources
from foretoken.training.dataset.card import check_vocabulary
from foretoken.training.dataset.making import DataConfig, make_data
from foretoken.training.dataset.records import every_chat, read_told, shards
from foretoken.training.dataset.windows import Read, cut, digest

CONFIG = DataConfig(
    chats=0, shard=8, new_tokens=8, held_out=0.2, laws=5, repeated=1.0, rows=16, text_window=24,
    temperatures=(0.0,),
)  # fmt: skip


@pytest.fixture(scope="module")
def session(tiny_pair, byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = CHAT
    with foretoken.load(talker(tiny_pair[0]), "plain", tokenizer=tokenizer, max_rows=16) as made:
        yield made


def story(n, sentences=12):
    return " ".join(f"tree {n} has {i * n % 17} leaves and {i} roots." for i in range(sentences))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(story(3))
    return path


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "records.jsonl"
    chat = [
        {"role": "user", "content": "how many leaves?"},
        {"role": "assistant", "content": "seven"},
        {"role": "user", "content": "and roots?"},
    ]
    records = [{"text": story(1)}, {"messages": chat}, {"text": ""}, {"text": story(2), "n": 1}]
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return path


def made(session, out, *texts, config=CONFIG):
    return make_data(session, config, out, texts=[str(text) for text in texts], show=False)


def windows(folder, split="train"):
    return [one.prompt + one.answer for one in every_chat(folder, split, text=True)]


def test_laws_of_text_are_the_targets_at_every_token_of_it(session, file, tmp_path):
    made(session, tmp_path / "out", file)
    model, checked = session.target.model, 0
    for path in shards(tmp_path / "out", "train", text=True):
        for window, laws in read_told(path):
            ids = torch.tensor([window.prompt + window.answer])
            with torch.no_grad():
                truth = model(ids).logits[0, :-1].float().log_softmax(-1)
            best = truth.topk(5)
            torch.testing.assert_close(laws.log_probs.float(), best.values, atol=5e-3, rtol=1e-2)
            told = truth.gather(-1, laws.tokens.long())
            torch.testing.assert_close(laws.log_probs.float(), told, atol=5e-3, rtol=1e-2)
            assert window.kind == "text" and len(window.prompt) == 1
            checked += len(told)
    assert checked > 100


def test_windows_are_the_text_without_what_comes_twice(session, file, tmp_path):
    again = tmp_path / "again.txt"
    again.write_text(file.read_text())
    notes = made(session, tmp_path / "out", file, again)
    ids = session.tokenizer(file.read_text())["input_ids"]
    kept = windows(tmp_path / "out", "train") + windows(tmp_path / "out", "valid")
    assert sorted(kept) == sorted(cut(ids, 24))
    assert windows(tmp_path / "out", "valid")
    assert [told["windows"] for told in notes["text"]] == [len(kept), 0]
    assert sum(notes["splits"][split]["text_tokens"] for split in ("train", "valid")) == sum(
        map(len, kept)
    )
    assert str(file) in (tmp_path / "out" / "README.md").read_text()


def test_windows_fit_the_targets_context(make_llama, byte_tokenizer, file, tmp_path):
    model = make_llama(len(byte_tokenizer), max_position_embeddings=16)
    with foretoken.load(model, "plain", tokenizer=byte_tokenizer) as short:
        made(short, tmp_path / "out", file)
    assert max(map(len, windows(tmp_path / "out"))) == 16


def test_the_split_follows_from_the_seed(session, file, tmp_path):
    held = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        made(session, tmp_path / name, file, config=replace(CONFIG, seed=seed))
        held.append(windows(tmp_path / name, "valid"))
    assert held[0] == held[1] != held[2]


def test_a_single_window_is_learned_from_and_of_two_one_is_held_out(session, file, tmp_path):
    for count in (1, 2):
        out = tmp_path / str(count)
        made(session, out, file, config=replace(CONFIG, text_tokens=24 * count))
        assert [len(windows(out, split)) for split in ("train", "valid")] == [1, count - 1]


def test_no_more_text_is_read_than_asked_for(session, file, tmp_path):
    made(session, tmp_path / "out", file, config=replace(CONFIG, text_tokens=60))
    kept = windows(tmp_path / "out") + windows(tmp_path / "out", "valid")
    assert 48 <= sum(map(len, kept)) <= 60


def test_records_of_json_lines_are_text_or_questions(session, lines, tmp_path):
    notes = made(session, tmp_path / "out", lines, config=replace(CONFIG, chats=10, held_out=1e-9))
    prompts = {
        session.tokenizer.decode(chat.prompt) for chat in every_chat(tmp_path / "out", "train")
    }
    first = "<turn>user:how many leaves?<eos>"
    assert prompts == {
        first + "<turn>assistant:",
        first + "<turn>assistant:seven<eos><turn>user:and roots?<eos><turn>assistant:",
    }
    [told] = notes["text"]
    assert (told["records"], told["prompts"]) == (3, 2)
    assert notes["splits"]["train"]["kinds"] == {"given": 2}


def question(n):
    return {"messages": [{"role": "user", "content": f"how many roots has tree {n}?"}]}


def written(path, *records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_a_record_without_room_does_not_end_a_file(session, tmp_path):
    texts = {"text": story(1)}, {"text": story(2)}
    path = written(tmp_path / "mixed.jsonl", *texts, question(1))
    read = Read.of(session, replace(CONFIG, chats=4, text_tokens=48), [str(path)])
    assert read.tokens == 48 and len(read.prompts) == 1
    path = written(tmp_path / "chat first.jsonl", question(1), *texts)
    made(session, tmp_path / "out", path)
    assert windows(tmp_path / "out")


def test_reading_ends_where_there_is_room_for_nothing(session, tmp_path, monkeypatch):
    path = written(tmp_path / "full.jsonl", {"text": story(1)}, question(1), question(2))
    path.write_text(path.read_text() + "\nno record")
    config = replace(CONFIG, chats=1, text_tokens=48)
    assert Read.of(session, config, [str(path)]).sources[0]["records"] == 2
    endless = sources.Record("owner/name", "owner/name, record 1", story(1))
    where = "foretoken.training.dataset.windows"
    monkeypatch.setattr(f"{where}.read_source", lambda source: itertools.repeat(endless))
    monkeypatch.setattr(f"{where}.PATIENCE", 5)
    read = Read.of(session, config, ["owner/name"])
    assert read.tokens == 48 and not read.prompts, "no chat ever came"


@pytest.mark.parametrize("older", [False, True])
def test_more_chats_of_a_file_are_welcome(older, session, tmp_path):
    path = written(tmp_path / "mixed.jsonl", {"text": story(1)}, *map(question, range(16)))
    config, out = replace(CONFIG, chats=4, shard=4, text_tokens=48), tmp_path / "out"
    made(session, out, path, config=config)
    if older:  # once chats were part of what a text was called
        read = Read.of(session, config, [str(path)])
        plan = json.loads((out / "plan.json").read_text())
        plan["text"] = digest([read.windows, read.prompts])
        (out / "plan.json").write_text(json.dumps(plan))
    made(session, out, path, config=replace(config, chats=8))
    assert len(shards(out, "train", text=False)) == 2 and len(shards(out, "train", text=True)) == 1


def test_a_folder_is_all_its_files(session, file, lines, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "more.txt").write_text(story(5))
    notes = made(session, tmp_path / "out", tmp_path, config=replace(CONFIG, chats=1))
    assert [told["records"] for told in notes["text"]] == [5]


def test_a_run_on_text_that_broke_off_ends_with_the_same_files(session, file, tmp_path):
    made(session, tmp_path / "whole", file)
    made(session, tmp_path / "cut", file)
    for path in (tmp_path / "cut").glob("*-text-000001.*"):
        path.unlink()
    before = contents(tmp_path / "whole")
    assert contents(tmp_path / "cut") != before
    card = (tmp_path / "whole" / "card.json").read_text()
    made(session, tmp_path / "cut", file)
    assert contents(tmp_path / "cut") == before
    assert made(session, tmp_path / "whole", file) == json.loads(card)


def test_starting_over_deletes_nothing_where_text_is_refused(session, file, tmp_path):
    made(session, tmp_path / "out", file)
    before = contents(tmp_path / "out")
    asked = {"fresh": True, "show": False}
    with pytest.raises(ConfigError, match="no such file"):
        make_data(session, CONFIG, tmp_path / "out", texts=[str(tmp_path / "typo.txt")], **asked)
    with pytest.raises(ConfigError, match="chats=0"):
        make_data(session, CONFIG, tmp_path / "out", **asked)
    assert contents(tmp_path / "out") == before
    other = replace(CONFIG, seed=1)
    make_data(session, other, tmp_path / "out", texts=[str(file)], **asked)
    assert contents(tmp_path / "out") != before, "made anew, with other options"


def test_other_text_in_the_same_folder_is_refused(session, file, tmp_path):
    made(session, tmp_path / "out", file)
    file.write_text(story(4))
    with pytest.raises(ConfigError, match="another text"):
        made(session, tmp_path / "out", file)


def test_a_folder_from_before_text_was_read_goes_on(session, tmp_path):
    config = replace(CONFIG, chats=4)
    given = ["one question", "two questions"]
    make_data(session, config, tmp_path, given, show=False)
    path = tmp_path / "plan.json"
    plan = json.loads(path.read_text())
    for name in ("text", "text_tokens", "features", "features_gib"):
        del plan[name]
    plan["text_window"] = CONFIG.text_window
    path.write_text(json.dumps(plan))
    make_data(session, config, tmp_path, given, show=False)
    with pytest.raises(ConfigError, match="another features"):
        make_data(session, replace(config, features="final"), tmp_path, given, show=False)


BAD = {
    "no json": '{"text": ',
    "no object": '["a list"]',
    "no field": '{"prose": "x"}',
    "no text": '{"text": 7}',
    "no messages": '{"messages": []}',
    "no role": '{"messages": [{"content": "x"}]}',
    "no user": '{"messages": [{"role": "system", "content": "x"}]}',
    "no list": '{"messages": "x"}',
}


@pytest.mark.parametrize("line", BAD.values(), ids=BAD)
def test_a_bad_record_is_named_and_nothing_is_written(line, session, lines, tmp_path):
    lines.write_text(lines.read_text().rstrip() + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"records\.jsonl, line 5"):
        made(session, tmp_path / "out", lines, config=replace(CONFIG, chats=3))
    assert not (tmp_path / "out").exists()


def test_chats_for_a_model_without_a_template_are_refused(
    tiny_pair, byte_tokenizer, lines, tmp_path
):
    with (
        foretoken.load(tiny_pair[0], "plain", tokenizer=byte_tokenizer) as base,
        pytest.raises(ConfigError, match=r"line 2(.|\n)*without a chat template"),
    ):
        made(base, tmp_path / "out", lines, config=replace(CONFIG, chats=3))
    assert not (tmp_path / "out").exists()


def test_empty_missing_and_foreign_files_are_refused(session, tmp_path):
    empty, binary, out = tmp_path / "empty.txt", tmp_path / "binary.txt", tmp_path / "out"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    for source, told in (
        (empty, "empty"),
        (binary, "cannot be read"),
        (tmp_path / "no.txt", "no such"),
    ):
        with pytest.raises(ConfigError, match=told):
            made(session, out, source)
    with pytest.raises(ConfigError, match="chats=0"):
        made(session, out)
    assert not out.exists()


def test_a_full_disk_leaves_whole_shards_of_text(session, file, tmp_path):
    made(session, tmp_path / "whole", file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        with pytest.raises(CheckpointError, match="shards before this one are whole"):
            made(session, tmp_path / "out", file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert not list((tmp_path / "out").glob("*.partial"))
    made(session, tmp_path / "out", file)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_local_data_set_is_read_as_its_files_are(session, file, tmp_path):
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_dict({"text": [file.read_text(), story(7)]})
    found.save_to_disk(tmp_path / "saved")
    (tmp_path / "columns").mkdir()
    found.to_parquet(tmp_path / "columns" / "part.parquet")
    read = [
        [record.text for record in sources.read_source(str(tmp_path / name))]
        for name in ("saved", "columns")
    ]
    assert read[0] == read[1] == [file.read_text(), story(7)]


def test_a_data_set_that_cannot_be_had_is_refused(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "picture.xyz").write_bytes(b"1")
    with monkeypatch.context() as patch:
        patch.setattr(sources, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="lacks datasets"):
            list(sources.read_source(str(tmp_path / "other")))
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match="cannot be read"):
        list(sources.read_source(str(tmp_path / "other")))


def test_texts_of_another_vocabulary_are_refused(session, file, make_llama, tmp_path):
    made(session, tmp_path, file)
    check_vocabulary(tmp_path, session)
    with (
        foretoken.load(make_llama(300), "plain", tokenizer=session.tokenizer) as other,
        pytest.raises(ConfigError, match="another vocabulary"),
    ):
        check_vocabulary(tmp_path, other)
