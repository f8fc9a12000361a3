"""Shapes by level, and how a budget narrows them."""

import itertools

import pytest

from foretoken.trees.levels import cut_beam, cut_branching, level_sizes, nodes_below_root


def test_sizes_multiply_downwards():
    assert level_sizes((4, 2, 2)) == [4, 8, 16] and nodes_below_root((4, 2, 2)) == 28
    assert level_sizes(()) == [] and nodes_below_root(()) == 0


@pytest.mark.parametrize(
    ("widths", "depth", "nodes", "expected"),
    [
        ((4, 2, 2), 3, 28, (4, 2, 2)),
        ((4, 2, 2), 2, 4, (2, 1)),
        ((4, 2, 2), 9, 12, (2, 2, 1)),
        ((1, 1, 1), 3, 2, (1, 1)),
        ((3,), 5, 0, ()),
        ((3, 2), 0, 10, ()),
    ],
)
def test_the_widest_level_gives_way_first(widths, depth, nodes, expected):
    assert cut_branching(widths, depth, nodes) == expected


def test_a_cut_fits_and_is_never_wider():
    for widths in itertools.product((1, 2, 3), repeat=3):
        for depth, nodes in itertools.product(range(5), range(20)):
            cut = cut_branching(widths, depth, nodes)
            assert len(cut) <= depth and nodes_below_root(cut) <= nodes
            assert all(kept <= asked for kept, asked in zip(cut, widths, strict=False))
            assert cut or not (depth and nodes), "a node fits, and none is drawn"


def test_a_beam_is_narrowed_alike_on_all_levels():
    assert cut_beam(4, 4, 16) == (4, 4, 4, 4)
    assert cut_beam(4, 3, 8) == (3, 3, 2)
    assert cut_beam(4, 5, 3) == (1, 1, 1)
    assert cut_beam(2, 3, 60) == (2, 2, 2)
    assert cut_beam(4, 0, 9) == cut_beam(4, 9, 0) == ()
