"""Every sampling option gives the same law with and without speculation, by enumeration."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from transformers.generation.logits_process import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from foretoken.audit import checks
from foretoken.audit.fixtures import needed
from foretoken.audit.law import BOUND, PROMPT, law_gap, own_law, total_variation
from foretoken.audit.rows import make_row
from foretoken.coins import SeededCoins
from foretoken.engine.assemble import assemble
from foretoken.engine.record import Recorder
from foretoken.lm.table import TableLM
from foretoken.methods import METHODS, Method
from foretoken.types import DecodeState, Finish, SamplingParams

VOCAB, TOKENS = 3, 3
HOT = {"temperature": 1.0}
END = {"eos": frozenset({2})}
LOSSLESS = [
    entry for entry in METHODS.values() if entry.lossless and entry.writes == "text"
]  # of beams: tests/contract/test_beams.py
every_row = pytest.mark.parametrize("entry", LOSSLESS, ids=lambda entry: entry.name)

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.4},
    "repetition penalty": {"repetition_penalty": 1.6},
    "presence penalty": {"presence_penalty": 0.8},
    "frequency penalty": {"frequency_penalty": 0.9},
    "logit bias": {"logit_bias": {1: 1.0, 0: -0.5}},
    "banned tokens": {"banned_tokens": frozenset({1})},
    "end token": END,
    "minimum length": {**END, "min_new_tokens": 2},
    "processors": {"processors": LogitsProcessorList([SequenceBiasLogitsProcessor({(0, 1): 2.0})])},
    "bad words": {
        "processors": LogitsProcessorList([NoBadWordsLogitsProcessor([[0, 1]], eos_token_id=9)])
    },
    "all at once": {
        **END,
        "temperature": 0.8,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {0: 0.4},
        "min_new_tokens": 1,
    },
}


def stops(text: list[int]) -> bool:
    """A stop text of two tokens, so that it can lie across steps and inside a block."""
    return text[-2:] == [0, 1]


def table() -> TableLM:
    return TableLM.random(VOCAB, seed=21)


@every_row
@pytest.mark.parametrize("option", OPTIONS)
def test_the_law_of_an_option(entry: Method, option: str) -> None:
    setting = {**HOT, **OPTIONS[option]}
    build = partial(checks.table_engine, entry, VOCAB, "fixed")
    gap = law_gap(build, table(), setting)
    assert gap.variation <= BOUND
    assert entry.name == "plain" or gap.law.accepted > 0, "no guess was ever accepted"
    without = own_law(table(), PROMPT, SamplingParams(max_new_tokens=TOKENS, **HOT))
    assert total_variation(gap.law.joint, without) > 1e-3, "the option changed nothing"


@every_row
def test_the_law_of_a_stop_across_accepted_blocks(entry: Method) -> None:
    build = partial(checks.table_engine, entry, VOCAB, "fixed")
    gap = law_gap(build, table(), HOT, ends=stops, tokens=4)
    assert gap.variation <= BOUND
    assert any(len(text) < 4 for text in gap.law.joint)
    assert all(not stops(list(text[:-1])) for text in gap.law.joint)


def perfect(entry: Method) -> Any:
    """The method with a draft that is always right, so that whole blocks are accepted."""
    config = {} if entry.name == "plain" else {"depth": 4, "nodes": 12}
    draft = TableLM.random(4, seed=21) if entry.needs_draft else None
    config |= needed(entry, 4, controller="fixed")
    return assemble(entry.name, TableLM.random(4, seed=21), draft, controller="fixed", **config)


def finished(entry: Method, params: SamplingParams, ended: Any = None):
    """A row decoded to its end, its engine's records, and its statistics."""
    engine = perfect(entry)
    row = make_row([0, 1, 2, 0, 1], params, SeededCoins(3), 4, ended=ended)
    recorder = Recorder([row])
    records = []
    for record in engine.run([row]):
        recorder(record)
        records.append(record)
    return row, records, recorder.stats[row.uid]


@every_row
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("limit", range(1, 13))
def test_token_limits_are_exact(entry: Method, temperature: float, limit: int) -> None:
    params = SamplingParams(max_new_tokens=limit, temperature=temperature)
    row, records, stats = finished(entry, params)
    assert len(row.new_tokens) == limit
    assert row.finish == Finish("length")
    assert stats.tokens == sum(len(record.emitted[0]) for record in records) == limit
    assert stats.target_steps == len(records)
    if limit >= 8 and entry.needs_draft:
        assert len(records) < limit, "whole blocks were accepted"


@every_row
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_written_or_counted_after_an_end(entry: Method, temperature: float) -> None:
    endless, _, _ = finished(entry, SamplingParams(max_new_tokens=40, temperature=temperature))
    reached = set()
    for end in set(endless.new_tokens):
        params = SamplingParams(max_new_tokens=40, temperature=temperature, eos=frozenset({end}))
        row, records, stats = finished(entry, params)
        assert row.new_tokens.count(end) == 1 and row.new_tokens[-1] == end
        assert row.finish == Finish("stop")
        assert stats.tokens == len(row.new_tokens)
        assert [t for record in records for t in record.emitted[0]] == row.new_tokens
        if temperature == 0.0:
            assert row.new_tokens == endless.new_tokens[: endless.new_tokens.index(end) + 1]
        reached.add(end)
    assert reached


@every_row
def test_a_stopping_rule_is_asked_after_every_single_token(entry: Method) -> None:
    seen: list[int] = []

    def ended(row: DecodeState) -> Finish | None:
        seen.append(len(row.new_tokens))
        return Finish("stop", "x") if len(row.new_tokens) == 11 else None

    row, _, stats = finished(entry, SamplingParams(max_new_tokens=40), ended)
    assert seen == list(range(1, 12))
    assert row.finish == Finish("stop", "x")
    assert stats.tokens == len(row.new_tokens) == 11
