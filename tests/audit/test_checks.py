"""The checks themselves: what they measure, and that they notice."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from foretoken.audit import checks, report
from foretoken.audit.drawn_trees import DrawnTree
from foretoken.audit.greedy import compare_greedy, first_difference
from foretoken.audit.law import PROMPT, engine_law, merged_law, own_law, total_variation
from foretoken.audit.report import AuditReport, AuditRow
from foretoken.controllers.fixed import Fixed
from foretoken.controllers.steady import Size
from foretoken.drafters.nothing import Nothing
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.engine.engine import Engine
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.methods import METHODS, VERIFIERS, resolve
from foretoken.row import make_row
from foretoken.types import Budget, Draw, Memory, SamplingParams, Shape
from foretoken.verifiers.point import Point


def test_own_law_is_a_law_and_ends_where_texts_end() -> None:
    target = TableLM.random(3, seed=1)
    params = SamplingParams(temperature=0.8, max_new_tokens=3, eos=frozenset({2}))
    joint = own_law(target, (0, 1), params, ends=lambda text: text[-2:] == [0, 1])
    assert sum(joint.values()) == pytest.approx(1.0, abs=1e-12)
    for text in joint:
        assert 2 not in text[:-1]
        assert len(text) == 3 or text[-1] == 2 or text[-2:] == (0, 1)
    first = target.after([0, 1]).div(0.8).softmax(-1)
    assert joint[(2,)] == pytest.approx(float(first[2]), abs=1e-12)


def test_total_variation() -> None:
    assert total_variation({(0,): 1.0}, {(1,): 1.0}) == 1.0
    assert total_variation({(0,): 0.7, (1,): 0.3}, {(0,): 0.5, (1,): 0.5}) == pytest.approx(0.2)


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1


@pytest.mark.parametrize(("nudge", "tie"), [(1e-13, True), (1e-3, False)])
def test_near_ties_are_told_from_errors(nudge: float, tie: bool) -> None:
    """Two models that differ by a nudge part ways: below rounding a tie, above it an error."""
    logits = torch.zeros(2, 2, dtype=torch.float64)
    logits[0, 0], logits[0, 1] = 1.0 + nudge, 1.0
    swapped = logits.clone()
    swapped[0, 0] = 1.0 - nudge

    def plain() -> Engine:
        return Engine(TableLM(logits), Nothing(), Point(), Fixed())

    def other() -> Engine:
        return Engine(TableLM(swapped), Nothing(), Point(), Fixed())

    [divergence] = compare_greedy(plain, other, [[0]], 3).divergences
    assert (divergence.at, divergence.plain, divergence.other) == (0, 0, 1)
    assert divergence.margin == pytest.approx(nudge, rel=1e-2)
    assert divergence.near_tie is tie


def test_a_drawn_tree_declares_what_it_draws() -> None:
    lm = TableLM.random(3, seed=2)
    for draw in (Draw.IID, Draw.DISTINCT, Draw.POINT):
        assert DrawnTree(lm, (2, 1), draw).traits.draws == {draw}
        assert DrawnTree(lm, (2, 1), draw).traits.shape is Shape.TREE
        assert DrawnTree(lm, (1, 1), draw).traits.shape is Shape.CHAIN


@pytest.mark.slow  # the rules by themselves: test_audit_says_in_its_exit_status (tests/cli)
def test_the_report_is_one_page_and_a_verdict() -> None:
    told: list[str] = []
    page = report.run(["plain", "prompt-lookup"], progress=told.append)
    assert page.passed, page.failed
    assert len(told) == len(page.rows)
    data = json.loads(page.to_json())
    assert data["verdict"] == "pass" and data["failed"] == 0 and data["checks"] == len(page.rows)
    assert data["not_run"] == 2  # no models were given, and the report says so
    text = page.render(width=160)
    assert "prompt-lookup" in text and "not run" in text


def test_every_rule_of_the_catalogue_is_judged_on_every_candidate_it_is_exact_for() -> None:
    """A new verifier is one line in VERIFIERS; the audit finds it there."""
    subjects = {subject for _, subject, _ in checks.rule_jobs()}
    rules = [resolve(place) for place in VERIFIERS.values()]
    assert subjects == {
        f"{rule.__name__} on {draw.value} children"
        for rule in rules
        for draw in rule.exact_for - {Draw.JOINT}  # of beams: the jobs of beams
    }
    known = {job for entry in METHODS.values() for job in of_row(entry)}
    assert known == METHODS.keys()


def of_row(entry) -> set[str]:
    """The rows that the audit's jobs of one row name."""
    jobs = checks.all_jobs([entry], None, None, mutate=False)
    return {
        entry.name for _, subject, _ in jobs if subject.replace(",", " ").split()[0] == entry.name
    }


class GreedyOnly(PromptLookup):
    """Drafts nothing for sampled text."""

    def propose_one(self, row, budget):
        return super().propose_one(row, budget if row.warp.greedy else Budget(0, 0))


def test_sampled_text_that_nothing_was_drafted_for_is_not_judged(monkeypatch) -> None:
    def built(entry, vocab, *parts, **others):
        return Engine(TableLM.random(vocab, seed=21), GreedyOnly(), Point(), Fixed(Size(depth=2)))

    monkeypatch.setattr(checks, "table_engine", built)
    settings = ("temperature 1", "temperature 0")
    judged = partial(checks.method_law, METHODS["prompt-lookup"], "point", "fixed")
    good, detail, _ = judged(settings=settings)
    assert not good and "nothing was drafted at temperatures above 0" in detail
    good, detail, _ = judged(settings=settings[1:])
    assert good, detail


def test_greedy_and_cache_say_how_much_was_drafted_and_accepted() -> None:
    """With the target as its own draft; plain decoding drafts nothing."""
    plain = partial(checks.table_engine, METHODS["plain"], 4, "fixed")
    chain = partial(checks.table_engine, METHODS["chain"], 4, "fixed", guesses=21)
    prompts = checks.TABLE_PROMPTS
    for found in (checks.greedy(plain, chain, prompts, 12), checks.cache(chain, prompts, 6)):
        good, detail, values = found
        assert good and 0 < values["accepted"] <= values["drafted"]
        told = f"{values['accepted']} of {values['drafted']} drafted tokens accepted"
        assert detail.endswith(told)
    for found in (checks.greedy(plain, plain, prompts, 12), checks.cache(plain, prompts, 6)):
        good, detail, values = found
        assert good and values["drafted"] == 0 and detail.endswith("; nothing was drafted")


def test_a_failed_row_fails_the_report() -> None:
    good, bad = AuditRow("a", "x", "pass", ""), AuditRow("a", "y", "fail", "TV 0.1")
    assert AuditReport((good,)).passed
    assert not AuditReport((good, bad)).passed
    assert not AuditReport(()).passed, "an empty audit shows nothing"


def test_a_part_that_breaks_the_protocol_is_a_failed_row() -> None:
    def misuse():
        raise AssertionError("the cache holds other tokens than the row")

    row = report.run_one("cache", "somebody", misuse)
    assert row.verdict == "fail" and "other tokens" in row.detail


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="chain"):
        report.run(["chian"])


def test_merging_equal_states_changes_no_law() -> None:
    """All coins of three tokens at once, or step by step with equal states merged."""
    for name, controller in (("chain", "fixed"), ("chain", "cost_model"), ("spectr", "fixed")):
        vocab = 2 if name == "spectr" else 3
        build = partial(checks.table_engine, METHODS[name], vocab, controller)
        params = SamplingParams(max_new_tokens=3, temperature=1.0)

        def make(coins, params=params, vocab=vocab):
            return make_row(PROMPT, params, coins, vocab)

        def whole(build=build):
            engine = build()
            engine.drafter.traits = replace(engine.drafter.traits, memory=Memory.ROW)
            return engine

        with torch.inference_mode():
            full, merged = engine_law(whole, make), merged_law(build, make)
        assert total_variation(full.joint, merged.joint) < 1e-12
        assert full.drafted == pytest.approx(merged.drafted)
        assert full.accepted == pytest.approx(merged.accepted)
        assert merged.outcomes < full.outcomes
