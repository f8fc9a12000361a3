import random

import pytest

from foretoken.controllers.survival import Alarm, Ranks, Slots
from foretoken.trees.build import from_paths

TRUTH = (0.9, 0.6, 0.8, 0.3)


def simulate(steps, seed=0):
    """Accepted and offered lengths under lengths that change at random."""
    chance = random.Random(seed)
    for _ in range(steps):
        offered = chance.choice((1, 2, 2, 3, 4))
        accepted = 0
        while accepted < offered and chance.random() < TRUTH[accepted]:
            accepted += 1
        yield accepted, offered


def test_conditional_trials_are_unbiased_under_changing_lengths():
    slots = Slots(half_life=1e9)
    for accepted, offered in simulate(20000):
        slots.update(accepted, offered)
    found = slots.rates(4, [0.5] * 4, 1e-9)
    for slot, (rate, truth) in enumerate(zip(found, TRUTH, strict=True)):
        error = (truth * (1 - truth) / slots.trials[slot]) ** 0.5
        assert abs(rate - truth) < 3.5 * error
    # Accepted over offered, slot by slot, counts slots that were never looked at as failures.
    pairs = list(simulate(20000))
    naive = sum(a >= 3 for a, _ in pairs) / sum(o >= 3 for _, o in pairs)
    assert naive < TRUTH[2] - 0.2


def test_survival_is_right_where_only_prefix_lengths_have_a_law():
    """Block verification: P(length >= j) is fixed whatever was offered beyond; slots multiply."""
    survival = (0.8, 0.5, 0.45)
    chance, slots = random.Random(1), Slots(half_life=1e9)
    for _ in range(20000):
        offered = chance.choice((1, 2, 3))
        coin = chance.random()
        slots.update(sum(coin < s for s in survival[:offered]), offered)
    product = 1.0
    for rate, truth in zip(slots.rates(3, [0.5] * 3, 1e-9), survival, strict=True):
        product *= rate
        assert product == pytest.approx(truth, abs=0.015)


def test_old_trials_fade_and_rescaling_changes_nothing():
    slots = Slots(half_life=4.0)
    for _ in range(50):
        slots.update(1, 1)
    for _ in range(4):
        slots.update(0, 1)
    assert slots.rate(0, 0.0, 1e-9) == pytest.approx(0.5, abs=0.01)
    for _ in range(400):  # far beyond the rescaling of units
        slots.update(1, 2)
    assert slots.rates(2, [0.5, 0.5], 1e-9) == pytest.approx([1.0, 0.0], abs=1e-6)


def test_new_slots_start_from_the_slot_before():
    slots = Slots(half_life=64.0)
    for _ in range(500):
        slots.update(1, 1)
    rates = slots.chained(3, 0.5, 2.0)
    assert rates[0] > 0.95 and rates[1] == rates[2] == rates[0]


def test_ranks_are_counted_where_the_parent_was_reached():
    tree = from_paths(0, [[1, 4], [2, 5], [2, 6], [3]])  # ranks 0, 1, 2 below the root
    children = tree.children()
    ranks = Ranks(half_life=1e9)
    second = children[0][1]
    ranks.update(tree, [second, children[second][1]])
    ranks.update(tree, [])
    assert ranks.rate(0, 0.5, 1e-9) == pytest.approx(0.0, abs=1e-6)  # tried thrice
    assert ranks.rate(1, 0.5, 1e-9) == pytest.approx(2 / 3, abs=1e-6)
    assert ranks.trials[0] == pytest.approx(3.0) and ranks.trials[2] == pytest.approx(2.0)
    assert sum(ranks.rates(8, 0.7, 2.0)) <= 1.0 + 1e-9


def test_the_alarm_rings_for_a_change_and_not_for_luck():
    chance, alarm = random.Random(3), Alarm()
    false = sum(alarm.rings(chance.random() < 0.7) for _ in range(2000))
    assert false < 40
    waited = 0
    while not alarm.rings(chance.random() < 0.1):
        waited += 1
    assert waited < 25
