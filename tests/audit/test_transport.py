"""The best possible acceptance: brute force, threshold cuts and the linear programme agree."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest
import torch
from random_laws import laws_with_zeros, whole_number_laws
from torch import Tensor

from foretoken.audit import transport
from foretoken.audit.acceptance import RULES, greedy, single
from foretoken.audit.transport import by_cut, by_flow, candidate_sets
from foretoken.errors import ConfigError
from foretoken.types import Draw

DRAWS = [Draw.IID, Draw.DISTINCT, Draw.MIXED]


def brute_force(p: Tensor, sets: dict[tuple[int, ...], float]) -> float:
    """The smallest cut over all sets of tokens."""
    best = 1.0
    for size in range(len(p) + 1):
        for among in itertools.combinations(range(len(p)), size):
            inside = sum(chance for drawn, chance in sets.items() if set(drawn) <= set(among))
            best = min(best, float(p[list(among)].sum()) + 1.0 - inside)
    return best


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("laws", [whole_number_laws, laws_with_zeros])
def test_all_ways_to_the_optimum_agree(k: int, draw: Draw, laws) -> None:
    for p, q in laws(5, 12, seed=k):
        sets = candidate_sets(q, k, draw)
        assert sum(sets.values()) == pytest.approx(1.0, abs=1e-12)
        exact = brute_force(p, sets)
        assert by_flow(p, sets) == pytest.approx(exact, abs=1e-9)
        if draw is Draw.MIXED:
            assert greedy(p, q, k) == pytest.approx(exact, abs=1e-12)
        else:
            assert by_cut(p, q, k, draw) == pytest.approx(exact, abs=1e-12)
        if k == 1:
            assert exact == pytest.approx(single(p, q), abs=1e-12)


@pytest.mark.parametrize("laws", [whole_number_laws, laws_with_zeros])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_no_rule_is_above_its_optimum(k: int, laws) -> None:
    for p, q in laws(7, 20, seed=k):
        for rule in RULES:
            sets = candidate_sets(q, k, rule.draw)
            assert rule.accepts(p, q, k) <= by_flow(p, sets) + 1e-9


def test_distinct_candidates_are_sets_of_their_number() -> None:
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    sets = candidate_sets(q, 2, Draw.DISTINCT)
    assert set(sets) == {(0, 1), (0, 2), (1, 2)}
    assert sets[1, 2] == pytest.approx(0.3 * 0.2 / 0.7 + 0.2 * 0.3 / 0.8)
    assert set(candidate_sets(q, 2, Draw.IID)) == {*sets, (0,), (1,), (2,)}
    assert candidate_sets(q, 2, Draw.MIXED) == pytest.approx({(0, 1): 0.6, (0, 2): 0.4})
    assert candidate_sets(q, 9, Draw.DISTINCT) == pytest.approx({(0, 1, 2): 1.0})
    assert candidate_sets(q, 9, Draw.MIXED) == {(0, 1, 2): 1.0}


def test_the_independent_formula_is_wrong_for_distinct_draws() -> None:
    """q(A)^k where candidates are distinct says they fail more often than they do."""
    p, q = whole_number_laws(6, 1)[0]
    assert by_cut(p, q, 2, Draw.DISTINCT) > by_cut(p, q, 2, Draw.IID) + 1e-3


def test_without_scipy_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r"foretoken\[audit\]"):
        importlib.reload(transport)
    monkeypatch.undo()
    importlib.reload(transport)
