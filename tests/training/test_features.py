"""Captured features in files: every token once per epoch, and never all of them in memory."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foretoken.errors import ConfigError
from foretoken.training.features import JUDGED, JUDGED_TEXTS, WINDOW, Features, Shuffled

MIB = 2**20


def shards(folder: Path, lengths, width=2):
    """Tokens numbered through; a token's features are its number."""
    folder.mkdir(parents=True, exist_ok=True)
    first, paths = 0, []
    for i, length in enumerate(lengths):
        numbers = torch.arange(first, first + length)
        states = numbers[:, None].expand(-1, width).float().contiguous()
        paths.append(folder / f"{i}.safetensors")
        save_file({"input_ids": numbers, "hidden": states}, paths[-1])
        first += length
    return Features(paths)


LENGTHS = [5, 1, 9, 4, 7, 3, 8, 2, 6, 10, 5, 4, 1, 3, 8, 9, 2, 7, 6]


def test_tokens_are_taken_by_their_numbers_in_the_order_asked_for(tmp_path):
    features = shards(tmp_path, LENGTHS)
    chosen = torch.randperm(len(features))[:20]
    found = features.take(chosen)
    assert torch.equal(found["input_ids"], chosen)
    assert torch.equal(found["hidden"], chosen[:, None].expand(-1, 2).float())


def test_every_token_comes_once_per_epoch_in_an_order_of_its_own(tmp_path):
    features = shards(tmp_path, LENGTHS)
    stream = Shuffled(features, 4, seed=1)
    epochs = [
        torch.cat([stream.chosen(e * stream.per_epoch + i) for i in range(stream.per_epoch)])
        for e in range(2)
    ]
    assert len(features) == 100 and stream.per_epoch == 25
    for epoch in epochs:
        assert epoch.sort().values.tolist() == list(range(100))
    assert not torch.equal(*epochs)


def test_a_batch_depends_on_its_index_and_the_seed_only(tmp_path):
    features = shards(tmp_path, LENGTHS)
    late = Shuffled(features, 6, seed=1).batch(31)["input_ids"]
    again = Shuffled(features, 6, seed=1)
    for index in range(3):
        again.batch(index)
    assert torch.equal(again.batch(31)["input_ids"], late)
    assert not torch.equal(Shuffled(features, 6, seed=2).batch(31)["input_ids"], late)


def test_columns_are_in_the_order_of_the_files(tmp_path):
    features = shards(tmp_path, LENGTHS)
    assert features.column("input_ids").tolist() == list(range(100))
    double = features.each(lambda tokens: tokens["hidden"][:, 0] * 2)
    assert double.tolist() == [2.0 * i for i in range(100)]


def test_nothing_captured_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="wrote nothing"):
        shards(tmp_path, [0])


def resident():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak(features):
    """Bytes that reading every feature adds: two epochs of batches, then one look at each token."""
    features.mapped.clear()
    before, most = resident(), 0
    stream = Shuffled(features, 64, seed=0)
    for index in range(2 * stream.per_epoch):
        stream.batch(index)
        assert len(features.mapped) <= 2 * WINDOW
        most = max(most, resident() - before)
    features.each(lambda tokens: tokens["hidden"][:, 0])
    return max(most, resident() - before)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_the_peak_of_resident_features_does_not_grow_with_their_number(tmp_path):
    few = shards(tmp_path / "few", [128] * 2 * WINDOW, width=2048)  # a shard is 1 MiB
    many = shards(tmp_path / "many", [128] * 10 * WINDOW, width=2048)
    peak(few)  # what the first look costs once and for all
    small, large = peak(few), peak(many)
    assert large < small + WINDOW * MIB, (small / MIB, large / MIB)
    assert large < 3 * WINDOW * MIB, "all of them are ten windows"


def test_whole_texts_are_judged_in_few_at_once(tmp_path):
    """Of 300 texts with the logits of a whole vocabulary, not all at once."""
    save_file({"input_ids": torch.zeros(300, 128).long()}, tmp_path / "texts.safetensors")
    texts = Features([tmp_path / "texts.safetensors"])
    assert len(texts) == 300 and texts.judged_together == JUDGED_TEXTS < 32
    assert shards(tmp_path, LENGTHS).judged_together == JUDGED
