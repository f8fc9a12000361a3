"""What a draft is worth at given prices, and how many of its nodes are."""

import math
import random

import pytest

from foretoken.trees.worth import Calibration, paying, worth
from foretoken.types import Prices


def prices(nodes):
    return Prices(level=0.0, nodes=tuple(nodes), step=1.0)


@pytest.mark.parametrize("seed", range(20))
def test_paying_keeps_the_first_nodes_that_are_worth_most(seed):
    rng = random.Random(seed)
    chances = sorted((rng.random() for _ in range(8)), reverse=True)
    asked = prices([0.0, *sorted(3.0 * rng.random() for _ in range(rng.randrange(3, 10)))])
    kept, value = paying(chances, asked)
    values = [worth([1.0, *chances[:n]], asked) for n in range(len(chances) + 1)]
    assert value == pytest.approx(max(values)) and values[kept] == pytest.approx(max(values))
    assert values[0] == 0.0, "a root alone is worth nothing, and costs nothing"


def test_without_prices_every_node_is_worth_its_chance():
    assert paying([0.5, 0.25], None) == (2, 0.75)
    assert worth([1.0, 0.5, 0.25], None) == 0.75


def test_more_nodes_than_anybody_may_score_are_worth_nothing():
    assert worth([1.0, 0.9, 0.9], prices([0.0, 0.1])) == -math.inf
    assert paying([0.9, 0.9], prices([0.0, 0.1])) == (1, pytest.approx(0.8))


def test_no_node_costs_less_than_the_cheapest():
    asked = prices([0.0, 0.3, 0.4, 0.9])
    assert asked.cheapest == pytest.approx(0.2)
    assert all(asked.nodes[n] >= n * asked.cheapest for n in range(4))
    assert prices([0.0]).cheapest < 0.0 and prices([]).cheapest < 0.0
    assert list(asked.table) == list(asked.nodes)


def test_what_has_no_chance_has_none_by_experience():
    known = Calibration()
    assert known.chance(0.0, 0, False) == 0.0, "nothing was promised yet, and nothing is now"
    known.tried(0.01, 0, False, True)
    assert known.chance(0.0, 0, False) == 0.0


def test_a_promise_of_nan_has_no_chance_and_teaches_nothing():
    known = Calibration()
    known.tried(0.97, 0, True, True)
    before = known.chance(0.97, 0, True)
    assert known.chance(math.nan, 0, True) == 0.0
    known.tried(math.nan, 0, True, False)
    assert known.chance(0.97, 0, True) == before
