"""Longer matches are believed more, and all of them as far as they came true."""

import random

import pytest

from foretoken.drafters.parts.match_odds import EDGES, FLOOR, MatchOdds, least_copied
from foretoken.types import Budget, Prices


def test_a_longer_match_is_believed_more_before_anything_is_known() -> None:
    odds = MatchOdds()
    chances = [odds.chance(length, 1.0, True) for length in range(1, 40)]
    assert chances == sorted(chances) and 0.0 < chances[0] < 0.3 and 0.9 < chances[-1] < 1.0
    assert odds.chance(5, 0.5, True) == pytest.approx(0.5 * odds.chance(5, 1.0, True))


def test_chances_become_what_came_true_by_length_and_by_temperature() -> None:
    odds, rng = MatchOdds(), random.Random(0)
    for _ in range(600):
        odds.tried(2, 1.0, True, rng.random() < 0.1)
        odds.tried(12, 0.5, True, rng.random() < 0.45)
        odds.tried(2, 1.0, False, rng.random() < 0.6)
    assert odds.chance(2, 1.0, True) == pytest.approx(0.1, abs=0.06)
    assert odds.chance(12, 0.5, True) == pytest.approx(0.45, abs=0.08)
    assert odds.chance(2, 1.0, False) == pytest.approx(0.6, abs=0.08)
    assert odds.chance(4, 1.0, True) == MatchOdds().chance(4, 1.0, True), "others are untouched"


def test_no_chance_is_above_one() -> None:
    odds = MatchOdds()
    for _ in range(200):
        odds.tried(EDGES[-1], 0.3, True, True)
    assert odds.chance(EDGES[-1] + 50, 0.9, True) == 1.0


@pytest.mark.parametrize("matched", [1, 2, 5, 30])
def test_nothing_beyond_the_reach_of_a_match_is_likely_enough(matched) -> None:
    odds, rng = MatchOdds(), random.Random(1)
    for _ in range(100):
        odds.tried(rng.randint(1, 9), 1.0, True, rng.random() < 0.5)
    reach = odds.reach(matched, True, 0.05, 20)
    chances, chance = [], 1.0
    for ahead in range(20):
        chance *= odds.chance(matched + ahead, 1.0, True)
        chances.append(chance)
    assert reach == sum(one >= 0.05 for one in chances)
    assert odds.reach(matched, True, 0.0, 20) == 20


def test_copies_that_cost_nothing_to_score_still_have_to_be_likely_enough_to_look_at() -> None:
    free = Prices(0.0, (0.0,) * 9, 1.0)
    dear = Prices(0.0, tuple(0.5 * n for n in range(9)), 1.0)
    assert least_copied(Budget(8, 8, free)) == FLOOR
    assert least_copied(Budget(8, 8, dear)) == pytest.approx(0.5)
    assert least_copied(Budget(8, 8)) is None, "who names a size gets it"


def test_copies_that_never_came_true_are_still_tried_where_that_is_free() -> None:
    odds = MatchOdds()
    for _ in range(5000):
        odds.tried(1, 1.0, True, False)
    assert odds.reach(1, True, FLOOR, 8) == 1, "else nothing could tell that they come true again"
    for _ in range(200):
        odds.tried(1, 1.0, True, True)
    assert odds.chance(1, 1.0, True) > 0.2
