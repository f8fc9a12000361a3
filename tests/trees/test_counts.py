import pytest

from foretoken.trees.counts import Counts


def test_a_rate_starts_at_its_prior_and_moves_to_what_happened():
    counts = Counts(half_life=1000.0)
    assert counts.rate(3, prior=0.4, weight=2.0) == 0.4
    for i in range(400):
        counts.fade()
        counts.tried(3, i % 4 == 0)
    assert counts.rate(3, prior=0.4, weight=2.0) == pytest.approx(0.25, abs=0.01)
    assert counts.rate(2, 0.4, 2.0) == pytest.approx(0.4), "places do not mix"


def test_old_trials_count_less():
    counts = Counts(half_life=10.0)
    for happened in [True] * 100 + [False] * 10:
        counts.fade()
        counts.tried(0, happened)
    assert counts.rate(0, prior=0.5, weight=1e-6) == pytest.approx(0.5, abs=0.01)


def test_units_never_overflow():
    counts = Counts(half_life=0.5)
    for _ in range(500):
        counts.fade()
        counts.tried(0, True)
    assert counts.unit < 1e10
    assert counts.rate(0, prior=0.0, weight=1.0) == pytest.approx(4 / 7, abs=0.01)
