import pytest

from foretoken.errors import ConfigError
from foretoken.trees.templates import Template, level_order, paths_of_counts


def test_level_order_lists_parents_before_children():
    parents, ranks = level_order(Template(((0, 0), (2,), (0, 1), (2, 0, 3))))
    assert parents == [-1, 0, 0, 1, 1, 2, 5]
    assert ranks == [-1, 0, 2, 0, 1, 0, 3]
    assert level_order(Template((2, 1))) == ([-1, 0, 0, 1, 2], [-1, 0, 1, 0, 0])


def test_counts_of_children_give_paths_of_ranks():
    assert paths_of_counts((2,), (1, 0), (2,)) == ((0,), (1,), (0, 0), (0, 0, 0), (0, 0, 1))
    with pytest.raises(ValueError):
        paths_of_counts((2,), (1,))


def test_an_empty_template_is_refused():
    with pytest.raises(ConfigError, match="template"):
        Template(())
