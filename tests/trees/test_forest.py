"""Forests: shared prefixes, and what is left of them."""

from foretoken.coins import SeededCoins
from foretoken.trees.forest import Beam, BeamRow, Forest
from foretoken.types import DecodeState, SamplingParams


def grown() -> tuple[Forest, list[int]]:
    """7 - 1 - 2 - 3, 7 - 1 - 2 - 4, 7 - 1 - 5 - 4 and a stray 7 - 6."""
    forest = Forest(7)
    leaves = []
    for text in ((1, 2, 3), (6,), (1, 5, 4), (1, 2, 4)):
        node = 0
        for token in text:
            node = forest.child(node, token)
        leaves.append(node)
    return forest, leaves


def test_equal_prefixes_are_one_path() -> None:
    forest, leaves = grown()
    assert len(forest) == 8
    assert [forest.text(leaf) for leaf in leaves] == [[1, 2, 3], [6], [1, 5, 4], [1, 2, 4]]
    assert forest.text(0) == [] and forest.above(0) == []


def test_pruning_keeps_what_leaves_need_and_moves_the_root() -> None:
    forest, (a, _, b, c) = grown()
    left, cut = forest.pruned([a, b, c])
    assert cut.settled == [0] and left.tokens[0] == 1
    assert [left.text(cut.numbers[leaf]) for leaf in (a, b, c)] == [[2, 3], [5, 4], [2, 4]]
    assert set(cut.inner) == {1, 2, forest.parents[b]}  # leaves are not kept: they are asked anew
    left, cut = forest.pruned([a, c])
    assert cut.settled == [0, 1] and left.tokens == [2, 3, 4] and cut.inner == [2]


def test_a_single_leaf_leaves_a_root_only() -> None:
    forest, (a, *_) = grown()
    left, cut = forest.pruned([a])
    assert left.tokens == [3] and cut.settled == forest.above(a) and cut.inner == []


def test_shared_tokens_become_the_rows_own() -> None:
    params = SamplingParams(max_new_tokens=10)
    row = BeamRow(DecodeState([9, 7], 2, params, SeededCoins(0), None), 2)
    row.forest, (a, _, b, c) = grown()
    row.settle([Beam(leaf, -1.0, -2.0) for leaf in (a, b, c)])
    assert row.state.tokens == [9, 7, 1] and row.length == 3 and row.room == 7
    row.settle([row.beams[0], row.beams[2]])
    assert row.state.tokens == [9, 7, 1, 2] and row.length == 3
    row.settle([row.beams[1]])
    assert row.state.new_tokens == [1, 2, 4] and row.length == 3
