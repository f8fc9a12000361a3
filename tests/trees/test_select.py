"""Node selection against brute force and against Sequoia's published and measured values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from foretoken.trees.select import best_first_shape, best_nodes

SEQUOIA_TOY = (0.7, 0.12, 0.05, 0.03)


def full_tree(rng: random.Random, width: int, depth: int):
    """Values and parents of a complete tree whose children's chances sum to at most one."""
    values, parents, level = [1.0], [-1], [0]
    for _ in range(depth):
        below = []
        for node in level:
            shares = [rng.random() for _ in range(width)]
            total = sum(shares) + rng.random()
            for share in shares:
                below.append(len(values))
                parents.append(node)
                values.append(values[node] * share / total)
        level = below
    return values, parents


@pytest.mark.parametrize("seed", range(12))
def test_best_first_equals_brute_force_over_all_trees(seed: int) -> None:
    values, parents = full_tree(random.Random(seed), width=3, depth=2)
    for budget in range(7):
        best = 0.0
        for chosen in itertools.combinations(range(1, len(values)), budget):
            if all(parents[i] == 0 or parents[i] in chosen for i in chosen):
                best = max(best, sum(values[i] for i in chosen))
        kept = best_nodes(values, parents, budget)
        assert sum(values[i] for i in kept[1:]) == pytest.approx(best, abs=1e-12)


def test_equal_values_go_to_the_older_node() -> None:
    assert best_nodes([1.0, 0.5, 0.5, 0.5], [-1, 0, 0, 0], 2) == [0, 1, 2]


def test_values_that_grow_along_a_path_are_refused() -> None:
    with pytest.raises(AssertionError):
        best_nodes([1.0, 0.2, 0.3], [-1, 0, 1], 1)


def optimal_expected(rates: Sequence[float], nodes: int, depth: int) -> float:
    """Expected tokens per step of the best static shape, by dynamic programming.

    Sequoia's recurrence: T[m][l][b] is the best value of a subtree of m nodes (its root counted),
    at most l deep, whose root has at most b children; the b-th child takes m - y of the nodes.
    The reference for `best_first_shape`, which finds the same value faster.
    """
    rates = sorted((r for r in rates if r > 0.0), reverse=True)
    width, size = len(rates), nodes + 1
    best = [1.0 if m == 1 else -math.inf for m in range(size + 1)]  # depth 0, any width
    for _ in range(depth):
        table = [[1.0 if m == 1 else -math.inf for m in range(size + 1)]]  # no children
        for b in range(width):
            fewer = table[-1]
            row = list(fewer)
            for m in range(2, size + 1):
                for y in range(1, m):
                    row[m] = max(row[m], fewer[y] + rates[b] * best[m - y])
            table.append(row)
        best = table[-1]
    return max(best[1:])


@pytest.mark.parametrize("seed", range(6))
def test_heap_and_dynamic_programme_agree(seed: int) -> None:
    rng = random.Random(seed)
    rates = [rng.random() for _ in range(rng.randint(1, 5))]
    rates = [r / (sum(rates) + rng.random()) for r in rates]  # not sorted on purpose
    for nodes in (1, 2, 3, 5, 8, 13, 31):
        for depth in (1, 2, 4, 8):
            shape = best_first_shape(rates, nodes, depth)
            assert shape.expected == pytest.approx(optimal_expected(rates, nodes, depth), abs=1e-9)


@pytest.mark.parametrize(
    ("size", "tokens"), [(2, 1.7), (4, 2.533), (8, 3.179), (16, 3.713), (32, 4.24)]
)
def test_sequoia_toy_values(size: int, tokens: float) -> None:
    assert best_first_shape(SEQUOIA_TOY, size - 1, 64).expected == pytest.approx(tokens, abs=1e-3)


def test_a_chain_is_what_one_rate_gives() -> None:
    shape = best_first_shape(SEQUOIA_TOY[:1], 15, 64)
    assert shape.parents == tuple(range(-1, 15))
    assert shape.expected == pytest.approx(3.322, abs=1e-3)


def test_heap_emits_every_node_once_and_after_its_parent() -> None:
    shape = best_first_shape((0.4, 0.3, 0.2), 40, 4)
    names: list[tuple[int, ...]] = [()]
    for i in range(1, len(shape.parents)):
        assert shape.parents[i] < i
        names.append((*names[shape.parents[i]], shape.ranks[i]))
    assert len(set(names)) == len(names)
    assert max(len(name) for name in names) <= 4
    ranked = sorted(
        (
            float(0.4 ** n.count(0) * 0.3 ** n.count(1) * 0.2 ** n.count(2))
            for depth in range(1, 5)
            for n in itertools.product(range(3), repeat=depth)
        ),
        reverse=True,
    )
    assert sum(shape.values[1:]) == pytest.approx(sum(ranked[:40]), abs=1e-12)
