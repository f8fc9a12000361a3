"""Arrivals: the rate that was asked for, spread as chance spreads it, the same for every server."""

from itertools import islice
from random import Random

import numpy as np
import pytest

from foretoken.bench.load.arrivals import DAY, Level, day, poisson, schedule, share_of_day
from foretoken.errors import ConfigError


def test_poisson_arrivals_have_the_rate_and_the_dispersion_of_a_poisson_process() -> None:
    times = np.array(list(islice(poisson(5.0, Random(1)), 20_000)))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.03), "exponential"
    counts = np.histogram(times, bins=np.arange(0.0, times[-1] - 1.0, 2.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1), "index of dispersion"
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03, "gaps know nothing of each other"


def test_a_day_follows_its_curve_and_is_random_within() -> None:
    peak, seconds = 50.0, 2400.0
    times = np.array(list(day(peak, seconds, Random(2))))
    counts = np.histogram(times, bins=np.linspace(0.0, seconds, 25))[0]
    share = [np.mean([share_of_day(h + x) for x in np.linspace(0, 1, 50)]) for h in range(24)]
    wanted = peak * seconds / 24 * np.array(share)
    assert np.all(np.abs(counts - wanted) < 4.5 * np.sqrt(wanted))
    deviation = (counts - wanted) ** 2 / wanted
    assert 0.3 < deviation.mean() < 2.0, "as far from the curve as chance goes, and no nearer"
    assert counts[20] > 3 * counts[4], "the evening is busier than the night"


def test_the_curve_of_the_day_is_continuous_and_has_its_peak_at_one() -> None:
    assert max(DAY) == 1.0 and min(DAY) > 0.0 and len(DAY) == 24
    for hour in range(24):
        assert share_of_day(hour) == DAY[hour]
        assert share_of_day(hour + 0.999999) == pytest.approx(DAY[(hour + 1) % 24], abs=1e-5)


def test_schedules_repeat_with_their_seed_and_end_at_their_limits() -> None:
    level = Level("poisson", 4.0)
    first = schedule(level, 20, None, Random("0 / a"))
    assert first == schedule(level, 20, None, Random("0 / a")) and len(first) == 20
    assert first != schedule(level, 20, None, Random("1 / a"))
    short = schedule(level, None, 3.0, Random("0 / a"))
    assert short == [at for at in first if at < 3.0] and short
    assert schedule(level, 2, 3.0, Random("0 / a")) == first[:2]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("closed", 1.5),
        ("closed", 0.0),
        ("poisson", -1.0),
        ("day", float("inf")),
        ("poisson", float("nan")),
    ],
)
def test_a_load_that_cannot_be_is_refused(kind, value) -> None:
    with pytest.raises(ConfigError, match="what to do: pass for example --concurrency"):
        Level(kind, value)
