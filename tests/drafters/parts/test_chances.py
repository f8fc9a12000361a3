import pytest

from foretoken.drafters.parts.chances import affordable, trials
from foretoken.types import Budget, Draft, Draw, Prices, TokenTree

TREE = TokenTree((9, 1, 2, 3, 1, 4), (-1, 0, 0, 1, 1, 3))
CHANCES = (1.0, 0.6, 0.3, 0.5, 0.05, 0.4)
DRAFT = Draft(TREE, Draw.POINT, chances=CHANCES)


@pytest.mark.parametrize("nodes", range(7))
def test_the_best_nodes_are_kept(nodes):
    draft = affordable(DRAFT, Budget(9, nodes))
    tree = draft.tree
    assert sum(draft.chances[1:]) == pytest.approx(sum(sorted(CHANCES[1:], reverse=True)[:nodes]))
    assert len(tree) == len(draft.chances) == 1 + min(nodes, 5)
    kept = {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))}
    best = [(1,), (1, 3), (1, 3, 4), (2,), (1, 1)]
    assert kept == {(), *best[:nodes]}
    origin = range(6) if draft.origin is None else draft.origin
    assert [CHANCES[node] for node in origin] == list(draft.chances)


def test_nodes_that_cost_more_than_they_promise_are_left_out():
    def drafted(price, nodes=5):
        prices = Prices(0.0, tuple(price * n for n in range(6)), 1.0)
        return len(affordable(DRAFT, Budget(9, nodes, prices)).tree) - 1

    assert [drafted(price) for price in (0.0, 0.2, 0.45, 0.7)] == [5, 4, 2, 0]
    assert drafted(0.2, nodes=3) == 3


def test_trials_are_the_children_of_what_was_reached():
    assert list(trials(TREE, [1, 3, 8])) == [
        (1, 1, True),
        (2, 1, False),
        (3, 2, True),
        (4, 2, False),
        (5, 3, False),
    ]
    assert list(trials(TREE, [7])) == [(1, 1, False), (2, 1, False)]
    assert [node for node, _, _ in trials(TREE, [1])] == [1, 2], "nothing is known of what follows"
