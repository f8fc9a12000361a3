"""What steps are predicted to cost."""

import random
from itertools import pairwise
from statistics import median

import pytest

from foretoken.controllers.latency import Fit, Latency, drafted, scored
from foretoken.types import CostTable

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def machine(rows, nodes, cached):
    """Weights are read in 10 ms; a token takes 0.1 ms, and 0.4 beyond sixteen of them."""
    several = 1.0e-3 if nodes > 1 else 0.0
    work = 1e-4 * nodes + 3e-4 * max(nodes - 16, 0)
    return 1e-2 + several + work + 2e-4 * rows + 5e-7 * cached


def table(rows, cached, sizes=None, factor=1.0):
    sizes = sizes or ([rows * n for n in (1, 2, 3, 5, 9)] if rows > 1 else SIZES)
    return CostTable(
        {n: factor * machine(rows, n, cached) for n in sizes},
        {k: factor * (2e-4 + 1e-3 * k + 1e-5 * rows * k) for k in (1, 2, 4, 8)},
        rows=rows,
        cached=cached,
    )


def profiled(*batches):
    latency = Latency()
    for rows, cached in batches:
        latency.learn(table(rows, cached))
    return latency


def test_a_linear_machine_is_predicted_between_and_beyond_what_was_measured():
    latency = profiled((1, 128), (4, 900), (16, 2400))
    for rows, cached in ((1, 200), (2, 300), (7, 1500), (16, 3000), (20, 3000)):
        said = latency.scoring(rows, cached, 100)
        for nodes in (0, 1, 5, 30, 100):
            assert said[nodes] == pytest.approx(machine(rows, rows + nodes, cached), rel=0.03)
    levels, row, node = latency.drafting(8)
    assert levels[0] == 0.0
    assert levels[3] + 4 * row + 12 * node == pytest.approx(3.32e-3, rel=0.02)


def test_costs_rise_and_never_get_flatter():
    """A pause in one measurement neither bends the curve down nor makes a size the cheapest."""
    chance = random.Random(0)
    for _ in range(30):
        latency = Latency()
        noisy = {n: machine(1, n, 128) * chance.choice((1.0, 1.0, 1.1, 2.5)) for n in SIZES}
        latency.learn(CostTable(noisy, {1: 1e-3}, cached=128))
        said = latency.scoring(1, 128, 80)
        steps = [later - sooner for sooner, later in pairwise(said[1:])]
        assert min(steps) >= -1e-12
        assert all(b >= a - 1e-12 for a, b in pairwise(steps))


def test_steps_correct_what_was_measured_wrongly_and_pauses_do_not():
    latency = Latency()
    latency.learn(table(1, 128, factor=1.6))  # measured on a busy machine
    chance = random.Random(1)
    misses = []
    for step in range(400):
        rows = 4
        nodes, cached = rows * chance.choice((1, 2, 4)), 800 + step
        true = machine(rows, nodes, cached) * chance.uniform(0.95, 1.05)
        said = latency.scoring(rows, cached, nodes)[nodes - rows]
        misses.append(abs(said / true - 1.0))
        pause = 8.0 if chance.random() < 0.05 else 1.0
        latency.seen(rows, nodes, cached, true * pause)
    assert median(misses[200:]) < 0.05
    assert median(misses) < 0.10


def test_a_batch_that_nobody_measured_is_learned_from_its_steps():
    latency = profiled((1, 128))
    for _ in range(200):
        for nodes in (8, 16, 40):
            latency.seen(8, nodes, 1600, machine(8, nodes, 1600))
    said = latency.scoring(8, 1600, 32)
    assert said[0] == pytest.approx(machine(8, 8, 1600), rel=0.03)
    assert said[8] == pytest.approx(machine(8, 16, 1600), rel=0.03)


def test_what_nothing_tells_apart_is_not_put_on_rows():
    """One row says nothing of several, and is no reason to take them for dear."""
    latency = profiled((1, 128))
    alone = latency.scoring(1, 128, 16)[15]
    assert latency.scoring(16, 128, 0)[0] == pytest.approx(alone, rel=0.02)


def test_a_draft_that_costs_nothing_measurable_has_no_price():
    latency = Latency()
    latency.learn(CostTable({1: 1e-2, 2: 1e-2}, {}))
    assert latency.drafting(2) == ([0.0, 0.0, 0.0], 0.0, 0.0)


def test_a_fit_leaves_out_what_would_come_out_negative():
    fit = Fit(4)
    fit.profile({drafted(1, k, k): 1e-2 - 1e-4 * k for k in (1, 2, 4, 8)})
    assert min(fit.coefficients) >= 0.0
    assert fit.seconds(drafted(1, 4, 4)) == pytest.approx(9.6e-3, rel=0.03)
    assert len(scored(1, 1, 1)) == len(Latency().target.coefficients)


def test_a_size_that_kernels_like_is_known_once_it_was_tried():
    """Four tokens are a block of some products, and take less than three."""
    took = {1: 7.0e-3, 2: 7.6e-3, 3: 7.7e-3, 4: 7.2e-3, 5: 8.2e-3, 9: 9.0e-3}
    latency = Latency()
    latency.learn(CostTable({n: took[n] for n in (1, 2, 3, 5, 9)}, {1: 0.4e-3, 4: 1.6e-3}, 0.0))
    before = latency.scoring(1, 100, 8)
    assert before[3] > before[2], "a line through the others"
    for step in range(60):
        latency.seen(1, 3 + step % 2, 100, took[3 + step % 2])
    found = latency.scoring(1, 100, 8)
    assert found[3] == pytest.approx(took[4], rel=0.02)
    assert found[2] == pytest.approx(took[3], rel=0.02)
    assert found[8] == pytest.approx(took[9], rel=0.1)
    latency.seen(1, 3, 100, 5 * took[3])
    assert latency.scoring(1, 100, 8)[2] < 1.1 * took[3], "one pause"
    for _ in range(600):
        latency.seen(1, 9, 100, took[9])
    assert latency.scoring(1, 100, 8)[3] > 1.01 * found[3], "not tried for long: the line again"
