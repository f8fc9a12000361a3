"""What every row of METHODS promises; a new method is tested before its author writes a test.

The exact law, greedy text, cache, neighbours and seeds on tables are the audit's own jobs, run here
for every rule and controller of a row; below them is what the audit does not ask.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from quick_rows import new_drafters

from foretoken.audit import checks
from foretoken.audit.cache import cache_difference
from foretoken.audit.drawn_trees import DrawnTree
from foretoken.audit.fixtures import needed
from foretoken.audit.greedy import compare_greedy
from foretoken.audit.law import SETTINGS
from foretoken.audit.rows import seeded_rows, write
from foretoken.controllers.fixed import Fixed
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import Engine
from foretoken.engine.promise import promise_of_row
from foretoken.errors import PairingError
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.methods import FAMILIES, METHODS, VERIFIERS, Method, needs_draft, resolve
from foretoken.types import Draw, SamplingParams
from foretoken.verifiers.block import Block
from foretoken.verifiers.point import Point
from foretoken.verifiers.recursive import Recursive

VOCAB = 61
PROMPTS = [[(7 * i * i + 3 * i) % VOCAB for i in range(n)] for n in (23, 1, 9)]
TEXTS = [entry for entry in METHODS.values() if entry.writes == "text"]  # beams: test_beams.py
QUICK = (  # truncated, penalised, ended early, greedy, and nothing of it
    "temperature 1, seeded",
    "temperature 0.7, top-p 0.8",
    "penalties, min-p",
    "end token, minimum length, bias",
    "temperature 0",
)
OTHER = tuple(name for name in SETTINGS if name not in QUICK)
LOSSLESS = [entry for entry in TEXTS if promise_of_row(entry).lossless]


def table_jobs() -> list[Any]:
    """The audit's jobs. A row whose drafter an earlier row has already been held to every rule with
    is held to its own, and a rule is held to a controller that decides anew in every step with one
    drafter, all under the settings of `QUICK`; `make test-all` and `foretoken audit` run all.
    """
    known: set[str] = set()
    together: set[tuple[str, str]] = set()  # checks, and rules with a controller
    found = []
    for entry in TEXTS:
        own = f"{entry.name} ({entry.verifier}, fixed)"
        for check, subject, job in [*checks.law_jobs(entry, QUICK), *checks.table_jobs(entry)]:
            rule = subject.partition("(")[2]
            again = bool(rule) and entry.drafter in known and subject != own
            if rule and not rule.endswith(", fixed)"):
                again = (check, rule) in together
                together.add((check, rule))
            marks = [pytest.mark.slow] * again
            found.append(pytest.param(job, id=f"{subject}-{check}", marks=marks))
        for check, subject, job in checks.law_jobs(entry, OTHER):
            found.append(
                pytest.param(job, id=f"{subject}-{check}, other settings", marks=pytest.mark.slow)
            )
        known.add(entry.drafter)
    return found


TABLE_JOBS = table_jobs()
every_row = pytest.mark.parametrize("entry", TEXTS, ids=lambda entry: entry.name)


@pytest.fixture(scope="module")
def real_pair(make_llama):
    """A tiny target and a draft that often agrees with it, in float32."""
    target = make_llama(VOCAB, seed=3, num_hidden_layers=4)
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=generator)
    return open_lm(target, kernels="dense"), open_lm(draft, name="draft", kernels="dense")


def real_engine(entry: Method, pair, **config) -> Engine:
    target, draft = pair
    if entry.name == "plain":
        config = {}
    config |= needed(entry, VOCAB, hidden_size=draft.hidden_size, target_hidden=target.hidden_size)
    if entry.controller == "cost_model":  # a steady budget, so that every step drafts
        config["controller"] = "fixed"
    return assemble(entry.name, target, draft if needs_draft(entry) else None, **config)


@pytest.mark.parametrize("job", TABLE_JOBS)
def test_on_tables(job) -> None:
    good, seen, _ = job()
    assert good, seen


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


@pytest.mark.parametrize("entry", new_drafters(LOSSLESS))
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_greedy_text_on_a_model_is_plains(entry: Method, rows: int, real_pair) -> None:
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


@pytest.mark.parametrize("entry", new_drafters(TEXTS))
def test_the_cache_of_a_model_equals_a_fresh_recompute(entry: Method, real_pair) -> None:
    build = partial(real_engine, entry, real_pair, depth=4)
    seen = cache_difference(build, PROMPTS, 8)
    assert seen.good, f"{seen.relative} at {seen.where}"
    assert real_pair[0].rows_held == real_pair[1].rows_held == 0, "rows are freed at the end"


@every_row
def test_the_promise_of_a_row_is_that_of_its_engine(entry: Method) -> None:
    promise = checks.table_engine(entry, 4, "fixed").promise
    assert promise == promise_of_row(entry)
    assert promise.why and promise.lossless == (entry.name not in lossy_names())


def lossy_names() -> set[str]:
    return {row.name for family in FAMILIES if family.name == "lossy" for row in family.methods}


def test_a_lossy_row_has_a_rule_or_a_part_that_says_so() -> None:
    """No rule calls itself exact for what a lossy row hands to it, unless the scores are bent."""
    for row in METHODS.values():
        drafter, rule = resolve(row.drafter), resolve(VERIFIERS[row.verifier])
        if promise_of_row(row).lossless:
            continue
        if getattr(drafter, "lossless", True):
            assert not drafter.traits.draws & rule.exact_for, row.name
            assert drafter.traits.draws <= rule.lossy_for and rule.why, row.name
        else:
            assert drafter.why, row.name


def test_rules_are_exact_or_lossy_for_some_candidates_and_never_both() -> None:
    for name, place in VERIFIERS.items():
        rule = resolve(place)
        assert not rule.exact_for & rule.lossy_for, name
        assert rule.exact_for | rule.lossy_for, name


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
