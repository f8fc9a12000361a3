import pytest

from foretoken.controllers.step_costs import CostCurve, StepCosts, convex
from foretoken.types import CostTable


def test_costs_lie_on_lines_between_measured_sizes():
    curve = CostCurve({1: 1.0, 2: 1.5, 4: 2.0, 8: 4.0})
    assert [curve.at(n) for n in (1, 2, 3, 4, 6, 8)] == [1.0, 1.5, 1.75, 2.0, 3.0, 4.0]
    assert curve.at(12) == pytest.approx(6.0)  # the last slope goes on
    assert curve.at(100) == pytest.approx(4.0 + 92 * 0.5)
    assert curve.at(0) == 0.0


def test_a_curve_finds_a_wrong_table_out():
    curve = CostCurve({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0})
    for _ in range(300):
        curve.seen(1, 1.0)
        curve.seen(3, 1.5)
        curve.seen(8, 2.0)
    assert curve.at(1) == pytest.approx(1.0, rel=0.05)
    assert curve.at(3) == pytest.approx(1.5, rel=0.05)
    assert curve.at(8) == pytest.approx(2.0, rel=0.05)


def test_a_slower_machine_is_slower_at_sizes_nobody_ran():
    curve = CostCurve({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0})
    for _ in range(40):
        curve.seen(2, 1.3)
    assert curve.at(16) > 1.1


def test_sizes_nobody_ran_follow_the_largest_that_was_run():
    """A table of a busy machine says that nodes are dear; three of them turn out to be cheap."""
    busy = {1: 1.0, 2: 1.4, 3: 1.7, 4: 2.0, 8: 3.2, 16: 5.6}
    curve = CostCurve(busy)
    for _ in range(100):
        curve.seen(1, 1.0)
        curve.seen(3, 1.1)
    assert curve.at(3) == pytest.approx(1.1, rel=0.02)
    assert curve.at(8) / curve.at(3) == pytest.approx(busy[8] / busy[3], rel=0.02)
    learned = curve.at(8)
    for _ in range(100):
        curve.seen(8, learned)
        curve.seen(3, 0.9)
    assert curve.at(8) == pytest.approx(learned, rel=0.05), "a size that is run speaks for itself"


def test_one_node_alone_says_nothing_of_several():
    curve = CostCurve({1: 1.0, 2: 1.0, 8: 2.0})
    for _ in range(100):
        curve.seen(1, 0.5)
        curve.seen(2, 1.0)
    assert curve.at(1) == pytest.approx(0.5, rel=0.05)
    assert curve.at(8) == pytest.approx(2.0, rel=0.1)


def test_one_pause_of_the_machine_moves_little():
    curve = CostCurve({1: 1.0, 2: 1.0})
    curve.seen(1, 500.0)
    assert curve.at(1) < 1.2


def test_copies_learn_apart():
    costs = StepCosts.of(CostTable({1: 1.0, 4: 1.0}, {1: 0.1, 2: 0.2}, 0.01))
    twin = costs.copy()
    twin.rest.seen(1, 2.0)
    twin.draft.seen(2, 0.3)
    assert costs.plain(1) == 1.01 and costs.drafted(1, 2, 2) == pytest.approx(1.21)
    assert twin.plain(1) > 1.05 and twin.drafted(1, 2, 2) > 1.25


def test_a_single_measured_size_is_a_constant():
    curve = CostCurve({2: 3.0})
    assert [curve.at(n) for n in (1, 2, 9)] == [1.5, 3.0, 3.0]


def test_a_draft_measured_at_one_depth_costs_as_much_for_every_further_level():
    costs = StepCosts.of(CostTable({1: 1.0, 2: 1.0}, {1: 0.2}))
    assert costs.drafted(1, 3, 1) == pytest.approx(1.6)
    assert StepCosts.of(CostTable({1: 1.0, 2: 1.0}, {})).drafted(1, 3, 1) == pytest.approx(1.0)


def test_one_bad_measurement_does_not_bend_the_curve():
    clean = {n: max(1.0, 0.6 + 0.05 * n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)}
    assert convex(clean) == pytest.approx(clean)
    for bad in clean:
        if bad < 64:  # the last one has no other to be told by
            found = convex(clean | {bad: clean[bad] * 1.4})
            assert found == pytest.approx(clean, rel=0.07)


def test_a_smaller_forward_is_never_dearer():
    found = convex({1: 62.0, 2: 76.0, 3: 57.0, 4: 51.0, 6: 60.0, 8: 82.0, 12: 79.0, 16: 98.0})
    values = list(found.values())
    assert values == sorted(values) and values[0] == 51.0 and found[8] < 70.0


def test_the_second_node_may_cost_more_than_any_further_one():
    """One row is multiplied by other kernels than several."""
    clean = {1: 26.0, 2: 31.0, 4: 34.0, 8: 40.0, 16: 52.0}
    assert convex(clean) == pytest.approx(clean)
    assert convex(clean | {4: 45.0}) == pytest.approx(clean)
    costs = StepCosts.of(CostTable(clean, {}))
    assert costs.rest.at(2) - costs.plain(1) == pytest.approx(5.0)


def test_one_bad_measurement_of_a_draft_does_not_set_the_price_of_a_level():
    clean = {1: 0.2, 2: 0.3, 3: 0.4, 4: 0.5, 6: 0.7, 8: 0.9, 12: 1.3}
    for bad in (1, 2, 3, 4, 6, 8):
        costs = StepCosts.of(CostTable({1: 1.0, 2: 1.0}, clean | {bad: 2.0 * clean[bad]}))
        for depth in (2, 3, 4, 6, 8):
            assert costs.draft.at(depth) == pytest.approx(clean[depth], rel=0.15)
