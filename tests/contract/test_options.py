"""Sampling options give the same law with and without speculation, by enumeration.

Temperatures, top-k, top-p, min-p, penalties, bias, end tokens and minimum lengths are settings of
the audit's exact law, which the contract runs for every row; here are the others, and all at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from quick_rows import new_drafters
from transformers.generation.logits_process import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from foretoken.audit import checks
from foretoken.audit.fixtures import needed
from foretoken.audit.law import (
    BOUND,
    PROMPT,
    SETTINGS,
    law_gap,
    own_law,
    total_variation,
)
from foretoken.coins import SeededCoins
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.engine.promise import promise_of_row
from foretoken.engine.record import Recorder
from foretoken.lm.table import TableLM
from foretoken.methods import METHODS, Method, needs_draft
from foretoken.row import make_row
from foretoken.types import DecodeState, Finish, SamplingParams, Shape

VOCAB, TOKENS = 3, 3
HOT = {"temperature": 1.0}
END = {"eos": frozenset({2})}
LOSSLESS = [
    entry for entry in METHODS.values() if entry.writes == "text" and promise_of_row(entry).lossless
]  # of beams: tests/contract/test_beams.py
every_row = pytest.mark.parametrize("entry", LOSSLESS, ids=lambda entry: entry.name)

OPTIONS: dict[str, dict[str, Any]] = {
    "banned tokens": {"banned_tokens": frozenset({1})},
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


@pytest.mark.parametrize("entry", new_drafters(LOSSLESS))
@pytest.mark.parametrize(
    "option",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "bad words")) for name in OPTIONS],
)  # which are a processor, as the one before them
def test_the_law_of_an_option(entry: Method, option: str) -> None:
    setting = {**HOT, **OPTIONS[option]}
    build = partial(checks.table_engine, entry, VOCAB, "fixed")
    gap = law_gap(build, table(), setting)
    assert gap.variation <= BOUND
    assert entry.name == "plain" or gap.law.accepted > 0, "no guess was ever accepted"


@pytest.mark.parametrize(
    "setting", [*OPTIONS.values(), *SETTINGS.values()], ids=[*OPTIONS, *SETTINGS]
)
def test_every_setting_has_a_law_of_its_own(setting: dict[str, Any]) -> None:
    """One that changes nothing would show nothing."""
    laws = [
        own_law(table(), PROMPT, SamplingParams(max_new_tokens=TOKENS, **{**HOT, **given}))
        for given in ({}, setting)
    ]
    unchanged = {**HOT, "seed": 0, **setting} == {**HOT, "seed": 0}  # a seed is no part of a law
    assert unchanged or total_variation(*laws) > 1e-3


@pytest.mark.parametrize("entry", new_drafters(LOSSLESS))
def test_the_law_of_a_stop_across_accepted_blocks(entry: Method) -> None:
    traits = checks.table_engine(entry, VOCAB, "fixed").drafter.traits
    vocab = 2 if traits.shape is Shape.TREE and not traits.fixed else VOCAB  # as many outcomes
    build = partial(checks.table_engine, entry, vocab, "fixed")
    prompt = [token % vocab for token in PROMPT]
    target = TableLM.random(vocab, seed=21)
    gap = law_gap(build, target, HOT, prompt=prompt, ends=stops, tokens=4)
    assert gap.variation <= BOUND
    assert any(len(text) < 4 for text in gap.law.joint)
    assert all(not stops(list(text[:-1])) for text in gap.law.joint)


def perfect(entry: Method) -> Any:
    """The method with a draft that is always right, so that whole blocks are accepted."""
    config = {} if entry.name == "plain" else {"depth": 4, "nodes": 12}
    draft = TableLM.random(4, seed=21) if needs_draft(entry) else None
    config |= needed(entry, 4, controller="fixed")
    return assemble(entry.name, TableLM.random(4, seed=21), draft, controller="fixed", **config)


def finished(entry: Method, params: SamplingParams, ended: Any = None):
    """A row decoded to its end, its engine's records, and its statistics."""
    engine = perfect(entry)
    row = make_row([0, 1, 2, 0, 1], params, SeededCoins(3), 4, ended=ended)
    recorder = Recorder([row])
    records = []
    for record in decode([row], engine):
        recorder(record)
        records.append(record)
    return row, records, recorder.stats[row.uid]


@every_row
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_token_limits_are_exact(entry: Method, temperature: float) -> None:
    for limit in range(1, 13):
        params = SamplingParams(max_new_tokens=limit, temperature=temperature)
        row, records, stats = finished(entry, params)
        assert len(row.new_tokens) == limit
        assert row.finish == Finish("length")
        assert stats.tokens == sum(len(record.emitted[0]) for record in records) == limit
        assert stats.target_steps == len(records)
        if limit >= 8 and needs_draft(entry):
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
