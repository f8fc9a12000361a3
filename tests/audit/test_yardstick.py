"""The page of acceptances: shares of the optimum as published, and a verdict that can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest

from foretoken.audit import yardstick
from foretoken.audit.acceptance import RULES, k_sequential, recursive_independent, single
from foretoken.audit.transport import by_cut, by_flow, candidate_sets
from foretoken.audit.yardstick import Yardstick, measure, model_laws, random_laws
from foretoken.errors import ConfigError
from foretoken.types import Draw


@pytest.mark.parametrize("vocab", [8, 32])
def test_shares_of_the_optimum_on_random_laws(vocab: int) -> None:
    """k-sequential selection takes 95 to 98 %, recursive rejection 92 to 97 %, two candidates."""
    selection, recursion = [], []
    for p, q in random_laws(vocab, 60, related=False):
        best = by_flow(p, candidate_sets(q, 2, Draw.IID))
        assert best == pytest.approx(by_cut(p, q, 2, Draw.IID), abs=1e-9)
        selection.append(k_sequential(p, q, 2) / best)
        recursion.append(recursive_independent(p, q, 2) / best)
    assert 0.95 <= fmean(selection) <= 0.98
    assert 0.92 <= fmean(recursion) <= 0.97
    assert fmean(selection) > fmean(recursion)


def test_related_laws_favour_the_greedy_draft() -> None:
    rows = {(row.draw, row.rule): row for row in measure("x", random_laws(8, 20, True))}
    mixed, distinct = rows["mixed", "greedy"], rows["distinct", "recursive"]
    assert mixed.acceptance > distinct.acceptance
    assert mixed.acceptance > rows["iid", "recursive"].optimum, "above any rule for iid drafts"
    assert mixed.share == pytest.approx(1.0, abs=1e-9)


@pytest.fixture(scope="module")
def page() -> Yardstick:
    return yardstick.run(count=4)


def test_the_page_has_every_rule_and_its_verdict(page: Yardstick) -> None:
    assert page.passed
    data = json.loads(page.to_json())
    assert data["passed"] and set(data["one_candidate"]) == {row.laws for row in page.rows}
    assert len(data["rows"]) == 4 * 3 * len(RULES)
    for row in page.rows:
        assert page.one[row.laws] <= row.acceptance + 1e-12 or row.draw == "mixed"
        assert row.share <= 1.0 + 1e-9
    assert "k-sequential" in page.render(width=120) and "best possible" in page.render(width=120)


def test_a_rule_above_its_optimum_fails_the_page(page: Yardstick) -> None:
    first, *others = page.rows
    assert not Yardstick(page.one, (replace(first, worst_excess=1e-3), *others)).passed
    assert not Yardstick(page.one, (replace(first, flow_gap=1e-3), *others)).passed


def test_laws_of_models_are_laws_and_their_own(pair_folders) -> None:
    target, draft = pair_folders
    laws = model_laws(target, draft, ["the cat is", "a dog"], 10)
    assert len(laws) == 10
    for p, q in laws:
        assert float(p.sum()) == pytest.approx(1.0) and float(q.sum()) == pytest.approx(1.0)
        assert 1 <= len(p) == len(q) <= 2 * yardstick.TOP_K
    assert len({single(p, q) for p, q in laws}) > 5


def test_a_target_without_a_draft_is_refused(pair_folders) -> None:
    with pytest.raises(ConfigError, match="two laws"):
        yardstick.run(pair_folders[0], count=2)
