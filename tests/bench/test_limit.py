"""The memory limit: bytes that a forward reads over the bandwidth of the same run."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from foretoken.bench import limit, words
from foretoken.bench.journal import Cell, Journal

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def cell(row: str, prompt: str, seconds: float, **more: object) -> Cell:
    return Cell(
        row=row, prompt=prompt, family="f", repetition=0, prompt_tokens=3,
        tokens=[1] * 10, seconds=seconds, **more,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_table_is_read_once_and_a_loose_one_by_the_row(dtype) -> None:
    loose = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).to(dtype)
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).to(dtype)
    assert limit.weight_bytes(tied) == tied.num_parameters() * dtype.itemsize
    assert limit.weight_bytes(loose) == limit.weight_bytes(tied)


def test_of_experts_those_count_that_one_token_visits() -> None:
    def model(experts: int, used: int) -> MixtralForCausalLM:
        config = MixtralConfig(**SIZES, num_local_experts=experts, num_experts_per_tok=used)
        return MixtralForCausalLM(config)

    some, all_of_them = (limit.weight_bytes(model(4, used)) for used in (1, 4))
    expert = 3 * SIZES["hidden_size"] * SIZES["intermediate_size"] * 4
    assert all_of_them - some == 2 * 3 * expert


def test_bandwidth_is_that_of_memory_and_not_of_nothing() -> None:
    found = limit.read_bandwidth(1 << 22, torch.device("cpu"))
    assert 1e8 < found < 1e13


def test_the_best_bandwidth_of_a_run_counts(tmp_path, monkeypatch) -> None:
    journal, measured = Journal(tmp_path / "journal.jsonl"), iter([2e10, 3e10, 1e10])
    monkeypatch.setattr(limit, "read_bandwidth", lambda size, device: next(measured))
    for _ in range(3):
        limit.note_bandwidth(journal, 100, torch.device("cpu"))
    assert limit.hold_against_limit({}, journal, 300)["bytes_per_second"] == 3e10


def test_every_row_that_wrote_has_its_distance(tmp_path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.note("bandwidth", "read", 1e10)
    journal.cells = [
        cell("plain", "a", 0.5, prefill=0.3, forwards=10),
        cell("plain", "b", 0.8, prefill=0.4, forwards=10),
        cell("plain", "c", 0.9, prefill=0.3, forwards=10),
        cell("tree", "a", 0.3, prefill=0.2, forwards=2),
        cell("engine", "a", 0.25),
    ]
    rows = {
        "plain": {"tokens_per_second": {"value": 12.5}},
        "tree": {"tokens_per_second": {"value": 200.0}},
        "engine": {"tokens_per_second": {"value": 40.0}},
        "broken": {"failed": "x"},
    }
    found = limit.hold_against_limit(rows, journal, 200_000_000)
    assert found["forward_ms"] == 20.0 and found["tokens_per_second"] == 50.0
    assert rows["plain"]["over_limit"] == pytest.approx({"forward": 2.0, "speed": 0.25})
    assert rows["tree"]["over_limit"] == pytest.approx({"forward": 2.5, "speed": 4.0})
    assert rows["engine"]["over_limit"] == {"forward": None, "speed": 0.8}
    assert "over_limit" not in rows["broken"]
    (said,) = words.memory_limit({"memory_limit": found}).values()
    assert "20.00 ms per forward, 50.0 tokens/s" in said and "10.0 GB/s" in said
    assert words.memory_limit({}) == {}, "results of before had no limit"
