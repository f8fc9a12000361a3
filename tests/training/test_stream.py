"""Streams: batches by index, rows of whole documents."""

import random

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.minis import vocabulary
from foretoken.minis.corpus import texts
from foretoken.training.stream import Document, PackedStream, pack
from foretoken.training.text import TextFiles


def numbered(rng: random.Random):
    while True:
        length = rng.randrange(3, 30)
        yield Document([length] * length, [0.5] * length)


def test_a_batch_depends_on_its_index_only():
    stream = PackedStream(documents=numbered, tokens=256, row_tokens=(64, 128), pad=0)
    late = stream.batch(7)
    assert all(
        torch.equal(a, b) for a, b in zip(late.values(), stream.batch(7).values(), strict=True)
    )
    assert late["input_ids"].shape == (2, 128)
    assert stream.batch(8)["input_ids"].shape == (4, 64)


def test_rows_hold_whole_documents_and_little_padding():
    stream = PackedStream(documents=numbered, tokens=4096, row_tokens=(128,), pad=0)
    batch = stream.batch(0)
    for row in batch["input_ids"].tolist():
        i = 0
        while i < len(row) and row[i]:
            assert row[i : i + row[i]] == [row[i]] * row[i]
            i += row[i]
        assert not any(row[i:])
    assert torch.equal(batch["weights"] == 0, batch["input_ids"] == 0)
    assert (batch["input_ids"] == 0).float().mean() < 0.05


def test_only_a_document_longer_than_a_row_is_cut():
    rows = pack(iter([Document([1] * 50, [1.0] * 50), Document([2] * 5, [1.0] * 5)]), 2, 20)
    assert sorted(len(row.tokens) for row in rows) == [5, 20]


@pytest.fixture(scope="module")
def tokenizer():
    return vocabulary.learn(texts(seed=0, count=10), 400)


def test_text_files_are_read_once_per_pass_and_resume_anywhere(tmp_path, tokenizer):
    paths = []
    for name in "ab":
        paths.append(tmp_path / f"{name}.txt")
        paths[-1].write_text("".join(f"{name}{i:04d}\n" for i in range(400)))
    stream = TextFiles(paths=paths, tokenizer=tokenizer, rows=1, row_tokens=20)
    blocks = stream._ends[-1]
    starts = {tokenizer.decode(stream.batch(i)["input_ids"][0][:8]) for i in range(blocks)}
    assert len(starts) == blocks
    again = TextFiles(paths=paths, tokenizer=tokenizer, rows=1, row_tokens=20)
    assert torch.equal(again.batch(5)["input_ids"], stream.batch(5)["input_ids"])


def test_json_lines_give_their_text_and_broken_ones_are_named(tmp_path, tokenizer):
    good = tmp_path / "good.jsonl"
    good.write_text('{"text": "Mia has 12 pears."}\n')
    batch = TextFiles(paths=[good], tokenizer=tokenizer, rows=1, row_tokens=64).batch(0)
    count = int(batch["weights"].sum())
    assert tokenizer.decode(batch["input_ids"][0][1:count]) == "Mia has 12 pears."
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"txet": "x"}\n')
    with pytest.raises(ConfigError, match="txet"):
        TextFiles(paths=[bad], tokenizer=tokenizer, rows=1, row_tokens=64).batch(0)
    with pytest.raises(ConfigError, match="check the path"):
        TextFiles(paths=[tmp_path / "none.txt"], tokenizer=tokenizer, rows=1, row_tokens=64)
