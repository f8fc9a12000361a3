"""The fastest arm drafts; the others get their turns, ever more rarely."""

from collections import Counter
from itertools import pairwise

from foretoken.controllers.arms import ENOUGH, FIRST, MOST, Arms
from foretoken.controllers.shapes import Bargain


def arms(*speeds: float, steps: int = 40) -> Arms:
    bargains = [Bargain(10, 64, 1.02, 32.0) for _ in speeds]
    for bargain, speed in zip(bargains, speeds, strict=True):
        for _ in range(steps):
            bargain.update(speed, 1.0)
    return Arms(bargains)


def test_the_fastest_arm_drafts_and_others_are_tried_more_and_more_rarely() -> None:
    chosen = arms(1.2, 2.0, 1.5)
    picks = [chosen.pick()[0] for _ in range(1000)]
    counts = Counter(picks)
    assert counts[1] > 950 and counts[0] > 3 and counts[2] > 3
    tries = [step for step, arm in enumerate(picks) if arm == 0]
    gaps = [b - a for a, b in pairwise(tries)]
    assert tries[0] < FIRST and gaps == sorted(gaps) and gaps[-1] <= MOST + 1


def test_an_arm_that_becomes_faster_takes_over_and_is_dropped_again() -> None:
    chosen = arms(2.0, 1.2)
    assert chosen.pick() == (0, False)
    for _ in range(200):
        chosen[1].update(3.0, 1.0)
    assert Counter(chosen.pick()[0] for _ in range(10))[1] >= 9
    for _ in range(200):
        chosen[1].update(1.0, 1.0)
    assert Counter(chosen.pick()[0] for _ in range(10))[0] >= 9


def test_probes_take_turns() -> None:
    chosen = arms(1.0, 1.0, 1.0)
    assert [chosen.next_probe() for _ in range(4)] == [1, 2, 0, 1]


def test_new_arms_are_tried_first_and_dropped_where_they_promise_nothing() -> None:
    chosen = arms(2.0, 1.0)
    fresh = Bargain(10, 64, 1.02, 32.0)
    chosen.bargains[1] = fresh
    tried = 0
    while chosen.pick() == (1, True):
        fresh.update(0.5, 1.0)
        tried += 1
    assert 1 <= tried < ENOUGH
    good = Arms([arms(2.0)[0], Bargain(10, 64, 1.02, 32.0)])
    for _ in range(ENOUGH):
        assert good.pick() == (1, True)
        good[1].update(3.0, 1.0)
    assert good.pick() == (1, False)
