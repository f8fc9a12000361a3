"""Longer matches are believed more, and all of them as far as they came true."""

import random

import pytest

from foretoken.drafters.parts.match_odds import EDGES, MatchOdds


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
