"""What every row of METHODS promises; a new method is tested before its author writes a test."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from foretoken.audit import checks
from foretoken.audit.cache import cache_difference
from foretoken.audit.drawn_trees import DrawnTree
from foretoken.audit.fixtures import needed
from foretoken.audit.greedy import compare_greedy
from foretoken.audit.rows import neighbour_differences, seed_differences, seeded_rows, write
from foretoken.controllers.fixed import Fixed
from foretoken.engine.assemble import assemble
from foretoken.engine.loop import Engine
from foretoken.errors import PairingError
from foretoken.lm.cached import CachedLM
from foretoken.lm.table import TableLM
from foretoken.methods import METHODS, VERIFIERS, Method
from foretoken.types import Draw, SamplingParams
from foretoken.verifiers.block import Block
from foretoken.verifiers.point import Point
from foretoken.verifiers.recursive import Recursive

VOCAB = 61
PROMPTS = [[(7 * i * i + 3 * i) % VOCAB for i in range(n)] for n in (23, 1, 9)]


def of_one_text(entry: Method, *more: str):
    """A parameter; methods of beams have a contract of their own."""
    skipped = pytest.mark.skip(reason="writes beams, not one text: tests/contract/test_beams.py")
    marks = () if entry.writes == "text" else (skipped,)
    return pytest.param(entry, *more, id="-".join((entry.name, *more)), marks=marks)


COMBINATIONS = [
    of_one_text(entry, verifier, controller)
    for entry in METHODS.values()
    for verifier, controller in checks.combinations(entry)
]
every_row = pytest.mark.parametrize("entry", [of_one_text(entry) for entry in METHODS.values()])
every_combination = pytest.mark.parametrize(("entry", "verifier", "controller"), COMBINATIONS)


@pytest.fixture(scope="module")
def real_pair(make_llama):
    """A tiny target and a draft that often agrees with it, in float32."""
    target = make_llama(VOCAB, seed=3, num_hidden_layers=4)
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=generator)
    return CachedLM(target, kernels="dense"), CachedLM(draft, name="draft", kernels="dense")


def real_engine(entry: Method, pair, **config) -> Engine:
    target, draft = pair
    if entry.name == "plain":
        config = {}
    config |= needed(entry, VOCAB, hidden_size=draft.hidden_size, target_hidden=target.hidden_size)
    if entry.controller == "cost_model":  # a steady budget, so that every step drafts
        config["controller"] = "fixed"
    return assemble(entry.name, target, draft if entry.needs_draft else None, **config)


@every_row
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_empty_budget_is_plain_decoding(entry: Method, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=temperature)
    plain = checks.table_engine(METHODS["plain"], 4, "fixed")
    empty = checks.table_engine(entry, 4, "fixed", depth=0)
    texts = [
        write(engine, seeded_rows(checks.TABLE_PROMPTS, params, 4)) for engine in (plain, empty)
    ]
    assert texts[0] == texts[1]


@every_row
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_text_is_plains(entry: Method, rows: int, real_pair) -> None:
    if not entry.lossless:
        pytest.skip("lossy by design")
    found = compare_greedy(
        partial(real_engine, METHODS["plain"], real_pair),
        partial(real_engine, entry, real_pair, depth=4),
        PROMPTS,
        tokens=40,
        max_rows=rows,
    )
    assert found.tokens == 40 * len(PROMPTS)
    assert not found.errors
    assert not found.divergences, "float32, a tiny model: not even a near tie is expected"


@every_combination
def test_the_law_is_the_targets(entry: Method, verifier: str, controller: str) -> None:
    if not entry.lossless:
        pytest.skip("lossy by design")
    good, seen, _ = checks.method_law(entry, verifier, controller)
    assert good, seen


@every_row
def test_the_cache_equals_a_fresh_recompute(entry: Method, real_pair) -> None:
    build = partial(real_engine, entry, real_pair, depth=4)
    seen = cache_difference(build, PROMPTS, 8)
    assert seen.good, f"{seen.relative} at {seen.where}"
    assert real_pair[0].rows_held == real_pair[1].rows_held == 0, "rows are freed at the end"


@every_combination
def test_neighbours_change_nothing(entry: Method, verifier: str, controller: str) -> None:
    build = partial(checks.table_engine, entry, 4, controller, verifier, 4)
    temperatures = checks.steady_temperatures(build())
    if not temperatures:
        pytest.skip("a lossy text follows the shape of its drafts, and that the neighbours")
    for temperature in temperatures:
        params = SamplingParams(max_new_tokens=40, temperature=temperature)
        assert neighbour_differences(build, checks.TABLE_PROMPTS, params) == 0


@every_combination
def test_a_seed_repeats_its_text(entry: Method, verifier: str, controller: str) -> None:
    build = partial(checks.table_engine, entry, 4, controller, verifier, 4)
    params = SamplingParams(max_new_tokens=40, temperature=1.0)
    assert seed_differences(build, checks.TABLE_PROMPTS, params) == 0


def test_a_wrong_pairing_names_a_right_one() -> None:
    lm = TableLM.random(3)
    for rule, draw, widths, right in (
        (Point(), Draw.IID, (1,), "recursive"),
        (Block(), Draw.DISTINCT, (1,), "recursive"),
        (Block(), Draw.IID, (2,), "recursive"),
    ):
        with pytest.raises(PairingError, match=type(rule).__name__) as caught:
            Engine(lm, DrawnTree(lm, widths, draw), rule, Fixed())
        assert right in caught.value.do and right in VERIFIERS
    Engine(lm, DrawnTree(lm, (2,), Draw.DISTINCT), Recursive(), Fixed())


def test_a_named_verifier_that_does_not_fit_is_refused() -> None:
    lm = TableLM.random(3)
    with pytest.raises(PairingError):
        assemble("chain", lm, TableLM.random(3), verifier="point")
    with pytest.raises(PairingError):
        assemble("tree", lm, TableLM.random(3), verifier="block")
