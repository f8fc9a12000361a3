import pytest

from foretoken.drafters.weighing import WeighingDrafter, affordable, emitted, trials
from foretoken.types import Budget, TokenTree, Verdict

TREE = TokenTree((9, 1, 2, 3, 1, 4), (-1, 0, 0, 1, 1, 3))
VALUES = [1.0, 0.6, 0.3, 0.5, 0.05, 0.4]


class Fixed(WeighingDrafter):
    def weigh(self, row, budget):
        return TREE, VALUES


@pytest.mark.parametrize("nodes", range(7))
def test_the_best_nodes_are_kept(nodes):
    tree, worth = affordable(TREE, VALUES, Budget(9, nodes))
    assert worth == pytest.approx(sum(sorted(VALUES[1:], reverse=True)[:nodes]))
    assert len(tree) == 1 + min(nodes, 5)
    kept = {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))}
    best = [(1,), (1, 3), (1, 3, 4), (2,), (1, 1)]
    assert kept == {(), *best[:nodes]}


def test_nodes_that_cost_more_than_they_promise_are_left_out(row):
    def drafted(price, nodes=5):
        prices = tuple(price * n for n in range(6))
        budget = Budget(9, nodes, 0.0, prices)
        return len(Fixed().propose_one(row([9], 12), budget, lambda *_: True).tree) - 1

    assert [drafted(price) for price in (0.0, 0.2, 0.45, 0.7)] == [5, 4, 2, 0]
    assert drafted(0.2, nodes=3) == 3


def test_a_verdict_stands_for_its_path_and_one_token_more():
    assert emitted(TREE, Verdict((1, 3), 7)) == [1, 3, 7]
    assert emitted(TREE, Verdict((), 7)) == [7]


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
