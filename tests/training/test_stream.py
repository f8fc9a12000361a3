"""Streams: batches by index, rows of whole documents."""

import random

import torch

from foretoken.training.stream import Document, PackedStream, pack


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
    assert torch.equal(batch["lengths"], (batch["input_ids"] != 0).sum(1))
    assert (batch["input_ids"] == 0).float().mean() < 0.05


def test_only_a_document_longer_than_a_row_is_cut():
    rows = pack(iter([Document([1] * 50, [1.0] * 50), Document([2] * 5, [1.0] * 5)]), 2, 20)
    assert sorted(len(row.tokens) for row in rows) == [5, 20]
