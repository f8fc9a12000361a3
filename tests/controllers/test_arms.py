"""Arm 0 has a bar to clear; the others are judged by their pace, and get their turns."""

from itertools import pairwise
from math import inf

import pytest

from foretoken.controllers.arms import ENOUGH, FIRST, MOST, Arms, Text
from foretoken.controllers.prices import Prices
from foretoken.controllers.shapes import NONE, Bargain
from foretoken.types import CostTable

PRICES = Prices.of(CostTable({n: 1.0 + 0.05 * (n - 1) for n in range(1, 65)}, {1: 0.01}, 0.0))


def arms(count: int) -> Arms:
    return Arms(Bargain(10, 60, 1.02, 32.0), count, 32.0)


def ran(chosen: Arms, text: Text, arm: int, tokens: int, spent: float, steps: int = 1) -> None:
    for _ in range(steps):
        chosen.forced = False
        chosen.update(arm, [text], [tokens], spent)


def tried(chosen: Arms, text: Text, arm: int, tokens: int, spent: float) -> None:
    """The steps in which a new arm is given its chance."""
    before, turns = chosen.bargain.speed, 0
    while (budget := chosen.budget([text], PRICES)).bar == inf:
        assert budget.arm == arm
        chosen.update(arm, [text], [tokens], spent)
        turns += 1
    assert turns == ENOUGH if tokens > spent else turns < ENOUGH
    assert chosen.bargain.speed == before


def test_one_drafter_gets_prices_at_the_speed_it_reaches() -> None:
    alone, text = arms(1), arms(1).text()
    ran(alone, text, 0, 3, 1.5, steps=200)
    budget = alone.budget([text], PRICES)
    assert budget.step_price == pytest.approx(2.0, abs=0.05) and budget.bar == 0.0
    assert budget.node_prices[10] == pytest.approx(budget.step_price * 0.5)
    ran(alone, text, 0, 1, 2.0, steps=200)
    assert alone.budget([text], PRICES) == NONE


def test_a_text_has_a_speed_of_its_own() -> None:
    alone = arms(1)
    slow, fast = alone.text(), alone.text()
    for _ in range(40):
        ran(alone, slow, 0, 3, 2.0)
        ran(alone, fast, 0, 8, 2.0)
    assert alone.speed([slow]) < 2.0 < 3.0 < alone.speed([fast])
    assert alone.speed([slow]) < alone.speed([alone.text()]) < alone.speed([fast])


def test_an_arm_drafts_where_a_look_up_is_worth_less_than_its_gain() -> None:
    chosen = arms(2)
    text = chosen.text()
    tried(chosen, text, 1, 4, 2.0)
    ran(chosen, text, 0, 3, 1.5, steps=5)
    budget = chosen.budget([text], PRICES)
    gain = chosen.gain(1, [text], budget.step_price)
    assert budget.arm == 1 and budget.bar == pytest.approx(gain + budget.step_price - 1.0)
    assert budget.bar > 0.5


def test_an_arm_that_brings_less_than_its_time_is_worth_is_left_alone() -> None:
    chosen = arms(2)
    text = chosen.text()
    tried(chosen, text, 1, 1, 2.0)
    ran(chosen, text, 0, 3, 1.2, steps=5)
    assert chosen.budget([text], PRICES).arm == 0


def test_it_may_be_good_in_one_text_and_not_in_another() -> None:
    chosen = arms(2)
    good, bad = chosen.text(), chosen.text()
    tried(chosen, good, 1, 5, 2.0)
    for _ in range(6):
        ran(chosen, good, 1, 5, 2.0)
        ran(chosen, bad, 1, 1, 3.0)
        ran(chosen, bad, 0, 2, 1.1)
    assert chosen.budget([good], PRICES).arm == 1
    assert chosen.budget([bad], PRICES).arm == 0


def test_an_unused_arm_is_tried_more_and_more_rarely() -> None:
    chosen = arms(2)
    text = chosen.text()
    tried(chosen, text, 1, 1, 3.0)
    turns = []
    for step in range(1000):
        budget = chosen.budget([text], PRICES)
        if budget.arm:
            turns.append(step)
        chosen.update(budget.arm, [text], [1 if budget.arm else 3], 1.5)
    gaps = [b - a for a, b in pairwise(turns)]
    assert FIRST - 1 <= turns[0] <= FIRST + 1 and gaps == sorted(gaps) and gaps[-1] <= MOST + 1


def test_nothing_is_drafted_where_nothing_pays() -> None:
    chosen = arms(2)
    text = chosen.text()
    ran(chosen, text, 1, 1, 4.0, steps=3)
    ran(chosen, text, 0, 1, 4.0, steps=10)
    assert chosen.budget([text], PRICES) == NONE


def test_who_spends_nothing_is_asked_all_the_same() -> None:
    chosen = Arms(Bargain(10, 60, 1.02, 32.0), 1, 32.0, sparing=True)
    text = chosen.text()
    ran(chosen, text, 0, 1, 4.0, steps=10)
    assert chosen.budget([text], PRICES).step_price == 1.0


def test_probes_take_turns() -> None:
    chosen = arms(3)
    assert [chosen.next_probe() for _ in range(4)] == [1, 2, 0, 1]
