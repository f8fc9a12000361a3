from foretoken.trees.build import from_paths, grafted
from foretoken.types import TokenTree


def paths(tree):
    return {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(1, len(tree))}


def below_root(tree):
    """A tree as `grafted` takes it: nodes without the root."""
    return tree.tokens[1:], [parent - 1 for parent in tree.parents[1:]]


def test_a_graft_holds_every_path_of_both_once():
    first = from_paths(7, [[1, 2, 3], [4]])
    second = from_paths(7, [[1, 2, 5, 6], [8], [4]])
    tree, place = grafted(first, *below_root(second))
    assert paths(tree) == paths(first) | paths(second)
    assert len(tree) == 1 + len(paths(tree)), "no two siblings share a token"
    assert tree.tokens[: len(first)] == first.tokens and tree.parents[: len(first)] == first.parents
    assert all(parent < node for node, parent in enumerate(tree.parents))
    for node, at in enumerate(place):
        ways = [t.tokens[i] for t, n in ((second, node + 1), (tree, at)) for i in t.path(n)]
        assert ways[: len(ways) // 2] == ways[len(ways) // 2 :]


def test_a_tree_grafted_on_itself_or_with_nothing_is_itself():
    tree = from_paths(0, [[1, 2], [1, 3], [2]])
    assert grafted(tree, *below_root(tree))[0] == tree
    assert grafted(tree, [], []) == (tree, [])
    assert grafted(TokenTree((0,), (-1,)), *below_root(tree))[0] == tree
