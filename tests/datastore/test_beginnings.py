from collections import Counter

import numpy as np

from foretoken.datastore.continuations import Continuations, beginnings, in_order


def ordered(rows, weights=None):
    paths = np.array(rows, np.int64)
    weights = np.ones(len(paths)) if weights is None else np.array(weights, float)
    return Continuations(1, *in_order(paths, weights), weights.sum())


def paths_of(found):
    """Every node as the tokens on its way from the root."""
    ways = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        assert parent < len(ways), "parents stand before their children"
        ways.append((*(ways[parent] if parent >= 0 else ()), token))
    return ways


def counted(rows, end, stops=frozenset()):
    """Occurrences of every beginning, by a dictionary."""
    counts = Counter()
    for row in rows:
        for n, token in enumerate(row):
            if token >= end:
                break
            counts[tuple(row[: n + 1])] += 1
            if token in stops:
                break
    return counts


def test_counts_are_those_of_a_dictionary():
    rng = np.random.default_rng(1)
    for case in range(80):
        rows = rng.integers(0, 4, (int(rng.integers(1, 40)), int(rng.integers(1, 6)))).tolist()
        stops = frozenset({1}) if case % 2 else frozenset()
        counts = counted(rows, 3, stops)
        found = beginnings(ordered(rows), 10_000, 3, stops)
        assert dict(zip(paths_of(found), found.weights, strict=True)) == counts


def test_the_most_frequent_are_kept_and_form_a_tree():
    rng = np.random.default_rng(2)
    for _ in range(60):
        rows = (rng.integers(0, 3, (30, 5)) ** 2).tolist()
        counts = counted(rows, 99)
        nodes = int(rng.integers(1, 25))
        found = beginnings(ordered(rows), nodes, 99)
        ways = paths_of(found)
        assert len(ways) == len(set(ways)) == min(nodes, len(counts))
        least = sorted(counts.values(), reverse=True)[: len(ways)]
        assert sorted(found.weights, reverse=True) == least


def test_a_parent_is_kept_before_a_child_that_counts_as_much():
    found = beginnings(ordered([[5, 6, 7]] * 3), 2, 99)
    assert paths_of(found) == [(5,), (5, 6)]


def test_a_row_stands_for_as_many_occurrences_as_it_says():
    found = beginnings(ordered([[1, 2], [3, 4]], [10.0, 2.5]), 9, 99)
    assert dict(zip(paths_of(found), found.weights, strict=True)) == {
        (1,): 10.0,
        (1, 2): 10.0,
        (3,): 2.5,
        (3, 4): 2.5,
    }


def test_nothing_in_nothing_out():
    assert beginnings(ordered([[1, 2]]), 0, 99).tokens == []
    assert beginnings(ordered([[7, 7]]), 5, 7).tokens == []
    assert beginnings(ordered([[1, 2]]).starting_with([3]), 5, 99).tokens == []


def test_rows_are_chosen_by_their_first_token():
    kept = ordered([[1, 2], [2, 1], [3, 1], [1, 4]]).starting_with([1, 3])
    assert kept.paths.tolist() == [[1, 2], [1, 4], [3, 1]] and len(kept.weights) == 3
